"""Softmax, log-softmax and logsumexp: outputs coupled over one or several dimensions, q = softmax(x)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .calculus import added
from .families import Coupled, Elementwise, Pair, signed
from .table import RULES, register


def log_softmax(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """transport s − 2qs + q² Σs,  residual −(Σg)(q − q²)."""
    q, dim = node._saved_result.exp(), signed(node._saved_dim)
    transport = None if s is None else s - 2 * q * s + q * q * s.sum(dim, keepdim=True)
    residual = None if g is None else (q * q - q) * g.sum(dim, keepdim=True)
    return added(transport, residual)


def softmax(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """transport q²(s − 2qs + Σ q²s),  residual q(1 − 2q)(g − Σ qg)."""
    q, dim = node._saved_result, signed(node._saved_dim)
    transport = residual = None
    if s is not None:
        transport = q * q * (s - 2 * q * s + (q * q * s).sum(dim, keepdim=True))
    if g is not None:
        residual = q * (1 - 2 * q) * (g - (q * g).sum(dim, keepdim=True))
    return added(transport, residual)


def logsumexp(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """transport q² s,  residual (q − q²) g."""
    x, result, dims = node._saved_self, node._saved_result, [signed(dim) for dim in node._saved_dim]
    shape = list(x.shape)
    for dim in dims or range(x.dim()):
        shape[dim] = 1
    q = (x - result.reshape(shape)).exp()
    transport = None if s is None else q * q * s.reshape(shape)
    residual = None if g is None else (q - q * q) * g.reshape(shape)
    return added(transport, residual)


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
register(Coupled(softmax), "SoftmaxBackward0")
register(Coupled(logsumexp), "LogsumexpBackward0")

BL89 = RULES.overlay(
    {
        "LogSoftmaxBackward0": Elementwise(elementwise_log_softmax),
        "SoftmaxBackward0": Elementwise(elementwise_softmax),
    }
)
