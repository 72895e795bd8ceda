"""Softmax and log-softmax: outputs coupled over one dimension, q = softmax(x)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..fast.chunking import by_rows, is_large
from .calculus import added
from .families import Coupled, Elementwise, Pair, signed
from .probabilities import apart, complement, spread, through_softmax
from .table import register


def log_softmax(y: Tensor, s: Tensor | None, g: Tensor | None, dim: int = -1) -> Tensor | None:
    """y = log q:  transport (1 − q)² s + q² (sum of the other s),  residual −q(1 − q) Σg."""
    q = y.exp()
    residual = None if g is None else spread(q, dim).mul_(g.sum(dim, keepdim=True).neg_())
    return residual if s is None else added(_log_softmax_transport(q, s, dim), residual)


def _log_softmax_transport(q: Tensor, s: Tensor, dim: int) -> Tensor:
    small, lead, rest = apart(q, dim)
    leads = lead.sign()
    total, of_others = s.sum(dim, keepdim=True), torch.addcmul(s, leads, s, value=-1).sum(dim, keepdim=True)
    transport = torch.addcmul(1 - small - leads, leads, rest).square_().mul_(s)
    return transport.addcmul_(small.square_(), total - s).addcmul_(lead.square_(), of_others)


def over_one_dimension(curvature: Callable[..., Tensor | None]) -> Coupled:
    """The rule of a function whose ``curvature(result, s, g, dim)`` couples the elements along one dimension."""

    def rule(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
        y, dim = node._saved_result, signed(node._saved_dim)
        if not is_large(y) or dim not in (-1, y.dim() - 1):
            return curvature(y, s, g, dim)
        tables = (None if t is None else t.reshape(-1, y.shape[-1]) for t in (y, s, g))
        (found,) = by_rows(lambda *rows: (curvature(*rows),), *tables)
        return None if found is None else found.reshape(y.shape)

    return Coupled(rule)


def elementwise_log_softmax(node: Any) -> Pair:
    """Each output as a function of its own input alone: f' = 1 − q,  f'' = q² − q."""
    q, dim = node._saved_result.exp(), signed(node._saved_dim)
    return complement(q, dim), spread(q, dim).neg_()


def elementwise_softmax(node: Any) -> Pair:
    """Each output as a function of its own input alone: f' = q − q²,  f'' = (q − q²)(1 − 2q)."""
    q = node._saved_result
    first = spread(q, signed(node._saved_dim))
    return first, first * (1 - 2 * q)


register(over_one_dimension(log_softmax), "LogSoftmaxBackward0")
register(over_one_dimension(through_softmax), "SafeSoftmaxBackward0", "SoftmaxBackward0")

BL89_SOFTMAX = {
    "LogSoftmaxBackward0": Elementwise(elementwise_log_softmax),
    "SafeSoftmaxBackward0": Elementwise(elementwise_softmax),
    "SoftmaxBackward0": Elementwise(elementwise_softmax),
}
