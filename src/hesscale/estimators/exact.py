"""The exact diagonals, of the Hessian and of the Gauss-Newton matrix: one pass per entry, many entries at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..double_backward import twice_differentiable
from ..graph import Edge, recompute
from ..recomputing import recomputed_once
from .batched_vjp import chunks, pulled_back, recorded, unit_vectors
from .cut import noted, predictions
from .problem import Problem


def hessian(problem: Problem) -> Sequence[Tensor | None]:
    """∂²L/∂p_i² for every entry i: the i-th entry of the Hessian-vector product H e_i."""
    with twice_differentiable(problem.model):
        outputs, extra = recorded(problem)
        return _slopes(problem.loss(outputs), problem.tensors, extra)


@recomputed_once()
def _slopes(loss: Tensor, params: Sequence[Tensor], extra: int) -> Sequence[Tensor | None]:
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    return [_own_slopes(grad, p, extra) for grad, p in zip(grads, params, strict=True)]


def _own_slopes(grad: Tensor | None, p: Tensor, extra: int) -> Tensor | None:
    if grad is None or not grad.requires_grad:
        return None
    result = p.new_zeros(p.numel())
    for start, stop in chunks(p.numel(), elements=p.numel() + extra):
        (rows,) = pulled_back([grad], [p], [unit_vectors(start, stop, p)])
        result[start:stop] = rows.flatten(1).diagonal(offset=start)
    return result.view(p.shape)


def ggn(problem: Problem) -> Sequence[Tensor | None]:
    """diag(Jᵀ H J), J the Jacobian of the model's output and H the Hessian of the loss with respect to it.

    Exact for every loss that can be differentiated twice. As many passes as there are outputs or parameters,
    whichever are fewer.
    """
    with twice_differentiable(problem.model):
        outputs, extra = recorded(problem)
        ends = noted(outputs)
        loss = problem.loss(outputs)
        return _gauss_newton(loss, predictions(loss, ends), problem.tensors, extra)


@recomputed_once()
def _gauss_newton(
    loss: Tensor, places: Sequence[Edge], params: Sequence[Tensor], extra: int
) -> Sequence[Tensor | None]:
    recompute(loss, params)
    with _ending_at(places):
        found = torch.autograd.grad(loss, [GradientEdge(*y) for y in places], create_graph=True, allow_unused=True)
    pairs = [(y, slope) for y, slope in zip(places, found, strict=True) if slope is not None]
    ys, slopes = [y for y, _ in pairs], [slope for _, slope in pairs]
    if sum(slope.numel() for slope in slopes) <= sum(p.numel() for p in params):
        return _by_outputs(ys, slopes, params, extra)
    return _by_parameters(ys, slopes, params, extra)


@contextmanager
def _ending_at(borders: Sequence[Edge]) -> Iterator[None]:
    """Within it gradients end at the borders: of two of which one was computed from the other, each is a variable."""
    numbers: dict[Any, set[int]] = {}
    for node, nr in borders:
        numbers.setdefault(node, set()).add(nr)
    handles = [node.register_prehook(partial(_without, own)) for node, own in numbers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without(own: set[int], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(torch.zeros_like(g) if nr in own and g is not None else g for nr, g in enumerate(grads))


def _by_outputs(ys: Sequence[Edge], slopes: Sequence[Tensor], params: Sequence[Tensor], extra: int) -> Sequence[Tensor]:
    """Σ_k (Jᵀ e_k) ∘ (Jᵀ H e_k) over all outputs k."""
    results = [torch.zeros_like(p) for p in params]
    size = sum(p.numel() for p in params) + extra
    for y, slope in zip(ys, slopes, strict=True):
        for start, stop in chunks(slope.numel(), elements=size):
            units = unit_vectors(start, stop, slope)
            plain = pulled_back([y], params, [units])
            with _ending_at(ys):
                rows = pulled_back([slope], ys, [units])
            curved = pulled_back(ys, params, rows)
            for result, left, right in zip(results, plain, curved, strict=True):
                result += (left * right).sum(0)
    return results


def _by_parameters(
    ys: Sequence[Edge], slopes: Sequence[Tensor], params: Sequence[Tensor], extra: int
) -> Sequence[Tensor | None]:
    """(J e_i)ᵀ H (J e_i) for every entry i; J e_i is the derivative of Jᵀw with respect to w, which is linear in w."""
    weights = [torch.zeros_like(slope, requires_grad=True) for slope in slopes]
    edges = [GradientEdge(*y) for y in ys]
    pulled = torch.autograd.grad(edges, params, weights, create_graph=True, allow_unused=True)
    return [_own_squares(u, p, weights, ys, slopes, extra) for u, p in zip(pulled, params, strict=True)]


def _own_squares(
    u: Tensor | None, p: Tensor, weights: Sequence[Tensor], ys: Sequence[Edge], slopes: Sequence[Tensor], extra: int
) -> Tensor | None:
    if u is None:
        return None
    result = p.new_zeros(p.numel())
    for start, stop in chunks(p.numel(), elements=p.numel() + extra):
        pushed = pulled_back([u], weights, [unit_vectors(start, stop, p)])
        with _ending_at(ys):
            curved = pulled_back(slopes, ys, pushed)
        result[start:stop] = sum((a * b).reshape(len(a), -1).sum(1) for a, b in zip(pushed, curved, strict=True))
    return result.view(p.shape)
