"""Softmax and log-softmax: outputs coupled over one dimension, q = softmax(x)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .calculus import added, through_softmax
from .families import Coupled, Curvatures, Elementwise, Pair, signed
from .pieces import by_rows
from .table import register


def log_softmax(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """transport s − 2qs + q² Σs,  residual (q − 1)q Σg."""

    def work(y: Tensor, s: Tensor | None, g: Tensor | None) -> Curvatures:
        q = y.exp()
        residual = None if g is None else (q - 1).mul_(q).mul_(g.sum(-1, keepdim=True))
        if s is None:
            return (residual,)
        transport = torch.addcmul(s, q, s, value=-2).add_(q.square_().mul_(s.sum(-1, keepdim=True)))
        return (added(transport, residual),)

    return _over(node, work, s, g)


def softmax(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """q = softmax(x) over one dimension."""
    return _over(node, lambda q, s, g: (through_softmax(q, s, g),), s, g)


def _over(node: Any, work: Callable[..., Curvatures], s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """``work`` on a node's result, s and g, with the dimension that couples their elements as the last one."""
    y, dim = node._saved_result, signed(node._saved_dim)
    if y.dim() > 1 and dim not in (-1, y.dim() - 1):
        (found,) = work(*(None if t is None else t.movedim(dim, -1) for t in (y, s, g)))
        return None if found is None else found.movedim(-1, dim)
    shape = (y.shape[:-1].numel(), y.shape[-1]) if y.dim() else (1, 1)
    (found,) = by_rows(work, *(None if t is None else t.reshape(shape) for t in (y, s, g)))
    return None if found is None else found.reshape(y.shape)


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
