"""Many backward passes through one recorded graph at once, as many as memory allows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..graph import Edge, edge_of
from .problem import Problem

_ELEMENTS_AT_ONCE = 2**24  # 128 MiB of float64 for what the passes of one chunk write, before temporaries


Output = Tensor | Edge


def pulled_back(outputs: Sequence[Output], inputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Jᵀv for k vectors v at once: [k, *shape] for each input, zeros where no output depends on it.

    ``outputs`` are tensors or edges of the graph, ``vectors`` holds one tensor [k, *shape] for each. The graph is kept.
    """
    pairs = [(y, v) for y, v in zip(map(_as_output, outputs), vectors, strict=True) if y is not None]
    count = len(vectors[0])
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if pairs:
        ys, vs = zip(*pairs, strict=True)
        found = _batched(ys, inputs, vs) if count > 1 else _one_by_one(ys, inputs, vs)
    return [x.new_zeros(count, *x.shape) if rows is None else rows for rows, x in zip(found, inputs, strict=True)]


def _as_output(y: Output) -> GradientEdge | None:
    if not isinstance(y, Tensor):
        return GradientEdge(*y)
    return GradientEdge(*edge_of(y)) if y.requires_grad else None


def _batched(ys: Sequence[GradientEdge], xs: Sequence[Tensor], vs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(ys, xs, vs, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except RuntimeError:
        # some backward formulas cannot be vmapped (group norm's in torch 2.13); a real error comes again right away
        return _one_by_one(ys, xs, vs)


def _one_by_one(ys: Sequence[GradientEdge], xs: Sequence[Tensor], vs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    rows = [torch.autograd.grad(ys, xs, v, retain_graph=True, allow_unused=True) for v in zip(*vs, strict=True)]
    return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


def chunks(count: int, *, elements: int) -> Iterator[tuple[int, int]]:
    """Bounds of consecutive pieces of ``count`` passes, each of which writes ``elements`` numbers."""
    size = max(1, _ELEMENTS_AT_ONCE // max(1, elements))
    for start in range(0, count, size):
        yield start, min(start + size, count)


def unit_vectors(start: int, stop: int, like: Tensor) -> Tensor:
    """The unit vectors number ``start`` to ``stop`` of a tensor's space, [stop − start, *shape]."""
    units = like.new_zeros(stop - start, like.numel())
    units.diagonal(offset=start).fill_(1)
    return units.view(-1, *like.shape)


def recorded(problem: Problem) -> tuple[Any, int]:
    """The model's outputs, from a forward pass that can be differentiated twice, and how many numbers it saved.

    The latter is what each of several simultaneous passes has to write again.
    """
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with twice_differentiable(problem.model), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = problem.outputs()
    return outputs, saved


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Forward passes in here avoid fused kernels (attention, recurrent layers) whose backward has no derivative."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for backend in (torch.backends.mkldnn, torch.backends.cudnn) if recurrent else ():
            stack.enter_context(_quiet(backend.flags(enabled=False)))
        yield


@contextmanager
def _quiet(context: AbstractContextManager[Any]) -> Iterator[None]:
    """The same context; mkldnn's warns on the way in and out of settings that are not touched here."""
    with warnings.catch_warnings(action="ignore"):
        context.__enter__()
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore"):
            context.__exit__(None, None, None)
