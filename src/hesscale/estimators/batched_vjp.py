"""Many backward passes through one recorded graph at once, as many as memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..graph import Edge, edge_of
from .problem import Problem

_ELEMENTS_AT_ONCE = 2**24  # 128 MiB of float64 for what the passes of one chunk write, before temporaries


Place = Tensor | Edge


def pulled_back(outputs: Sequence[Place], inputs: Sequence[Place], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Jᵀv for k vectors v at once: [k, *shape] for each input, zeros where no output depends on it.

    Outputs and inputs are tensors or edges of the graph, ``vectors`` holds one tensor [k, *shape] for each output. The
    graph is kept.
    """
    pairs = [(y, v) for y, v in zip(map(_as_edge, outputs), vectors, strict=True) if y is not None]
    edges = {index: edge for index, edge in enumerate(map(_as_edge, inputs)) if edge is not None}
    count = len(vectors[0])
    found: dict[int, Tensor | None] = {}
    if pairs and edges:
        ys, vs = zip(*pairs, strict=True)
        rows = (_batched if count > 1 else _one_by_one)(ys, [*edges.values()], vs)
        found = dict(zip(edges, rows, strict=True))
    return [_zeros(x, count) if (own := found.get(index)) is None else own for index, x in enumerate(inputs)]


def _as_edge(place: Place) -> GradientEdge | None:
    if not isinstance(place, Tensor):
        return GradientEdge(*place)
    return GradientEdge(*edge_of(place)) if place.requires_grad else None


def _zeros(x: Place, count: int) -> Tensor:
    data = x if isinstance(x, Tensor) else x[0]._input_metadata[x[1]]
    return torch.zeros(count, *data.shape, dtype=data.dtype, device=data.device)


def _batched(ys: Sequence[GradientEdge], xs: Sequence[GradientEdge], vs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(ys, xs, vs, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except RuntimeError:
        # some backward formulas cannot be vmapped (group norm's in torch 2.13); a real error comes again right away
        return _one_by_one(ys, xs, vs)


def _one_by_one(
    ys: Sequence[GradientEdge], xs: Sequence[GradientEdge], vs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
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
    """The model's outputs, and how many numbers the forward pass saved: several passes at once write each of them anew.

    Kernels that are chosen for it (``twice_differentiable``) have to stay so, for checkpoints run it again.
    """
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = problem.outputs()
    return outputs, saved
