"""Softmax and log-softmax: outputs coupled over one dimension, q = softmax(x)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..fast.chunking import by_rows, is_large
from .calculus import added, through_softmax
from .families import Coupled, Elementwise, Pair, signed
from .table import register


def log_softmax(y: Tensor, s: Tensor | None, g: Tensor | None, dim: int = -1) -> Tensor | None:
    """y = log q:  transport s − 2qs + q² Σs,  residual −(q − q²) Σg."""
    q = y.exp()
    residual = None if g is None else torch.addcmul(q, q, q, value=-1).mul_(g.sum(dim, keepdim=True).neg_())
    if s is None:
        return residual
    transport = torch.addcmul(s, q, s, value=-2).add_(q.square_().mul_(s.sum(dim, keepdim=True)))
    return added(transport, residual)


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
    q = node._saved_result.exp()
    return 1 - q, q * q - q


def elementwise_softmax(node: Any) -> Pair:
    """Each output as a function of its own input alone: f' = q − q²,  f'' = (q − q²)(1 − 2q)."""
    q = node._saved_result
    first = q - q * q
    return first, first * (1 - 2 * q)


register(over_one_dimension(log_softmax), "LogSoftmaxBackward0")
register(over_one_dimension(through_softmax), "SafeSoftmaxBackward0", "SoftmaxBackward0")

BL89_SOFTMAX = {
    "LogSoftmaxBackward0": Elementwise(elementwise_log_softmax),
    "SafeSoftmaxBackward0": Elementwise(elementwise_softmax),
    "SoftmaxBackward0": Elementwise(elementwise_softmax),
}
