"""Connectionist temporal classification: minus the logarithm of a sum over alignments.

With q = e^x for log-probabilities x, and p the share of alignments that are in a class at a time, the gradient is −p.
Torch hands q − p over, which is the same behind a log-softmax: the gradient of the loss plus Σq, a constant there.
Curvature has to be that of the same function. An alignment is in one class at a time, so the sum is linear in each q:

    f' = q − p,    f'' = q − p(1 − p) = f' + p²
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .calculus import added, pull
from .families import Coupled
from .table import register


def ctc_loss(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """f'² s + f'' g  for the loss of each sequence, as long as it lasts."""
    x = node._saved_log_probs.detach()  # [time, sequences, classes]
    seed = s if s is not None else g
    assert seed is not None
    slope = pull(node, torch.ones_like(seed))[0]
    if slope is None:
        return None
    transport = None if s is None else slope.square() * s.reshape(-1, 1)
    if g is None:
        return transport
    lengths = torch.as_tensor(node._saved_input_lengths, device=x.device)
    lasts = torch.arange(x.shape[0], device=x.device).unsqueeze(1) < lengths
    if node._saved_zero_infinity:
        lasts = lasts & torch.isfinite(node._saved_result0)
    bend = torch.where(lasts.unsqueeze(-1), slope + (x.exp() - slope).square(), 0.0)
    return added(transport, bend * g.reshape(-1, 1))


register(Coupled(ctc_loss), "CtcLossBackward0", "CtcLossBackward1")
