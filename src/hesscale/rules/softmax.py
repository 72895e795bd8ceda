"""Softmax and log-softmax: outputs coupled over one dimension, q = softmax(x)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .calculus import added, through_softmax
from .families import Coupled, Elementwise, Pair, signed
from .table import register


def log_softmax(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """transport s − 2qs + q² Σs,  residual −(Σg)(q − q²)."""
    q, dim = node._saved_result.exp(), signed(node._saved_dim)
    transport = None if s is None else s - 2 * q * s + q * q * s.sum(dim, keepdim=True)
    residual = None if g is None else (q * q - q) * g.sum(dim, keepdim=True)
    return added(transport, residual)


def softmax(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """q = softmax(x) over one dimension."""
    return through_softmax(node._saved_result, s, g, signed(node._saved_dim))


def elementwise_log_softmax(node: Any) -> Pair:
    """Each output as a function of its own input alone: f' = 1 − q,  f'' = q² − q."""
    q = node._saved_result.exp()
    return 1 - q, q * q - q


def elementwise_softmax(node: Any) -> Pair:
    """Each output as a function of its own input alone: f' = q − q²,  f'' = (q − q²)(1 − 2q)."""
    q = node._saved_result
    first = q - q * q
    return first, first * (1 - 2 * q)


register(Coupled(log_softmax), "LogSoftmaxBackward0")
register(Coupled(softmax), "SafeSoftmaxBackward0", "SoftmaxBackward0")

BL89_SOFTMAX = {
    "LogSoftmaxBackward0": Elementwise(elementwise_log_softmax),
    "SafeSoftmaxBackward0": Elementwise(elementwise_softmax),
    "SoftmaxBackward0": Elementwise(elementwise_softmax),
}
