"""What a node's own backward can tell when it is called by hand: first derivatives, and second ones by a nested run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

LOW_PRECISION = (torch.bfloat16, torch.float16)


@final
class Widened:
    """A node of half precision, seen in single precision: what it saved is converted when a rule reads it."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.node, name)
        if isinstance(value, tuple):
            return tuple(map(widened, value))
        return widened(value)


def in_single_precision(node: Any) -> Any:
    """The node, seen in single precision if it works in half."""
    return Widened(node) if node._input_metadata[0].dtype in LOW_PRECISION else node


def widened(value: Any) -> Any:
    """A tensor of half precision in single precision; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value


def pull(node: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Jᵀ grads, one tensor per input of the node. Nothing is freed and no hook runs."""
    if isinstance(node, Widened):
        return tuple(map(widened, _pull_wide(node.node, grads)))
    result = node(*grads) if callable(node) else node.apply(*grads)
    return result if isinstance(result, tuple) else (result,)


def _pull_wide(node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The pull of float32 through a node of half precision."""
    try:
        return pull(node, *grads)
    except (RuntimeError, NotImplementedError):  # a kernel that insists on its own dtype
        return _pull_in_parts(node, grads)


def _pull_in_parts(node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Three numbers of half precision hold the digits of a float32; J is linear, so they are pulled one by one."""
    kind = node._input_metadata[0].dtype
    largest = max((float(grad.abs().max()) for grad in grads if grad is not None and grad.numel()), default=0.0)
    scale = largest or 1.0  # keeps float16 away from overflow and underflow
    rest = [None if grad is None else grad / scale for grad in grads]
    total: tuple[Tensor | None, ...] = ()
    for _ in range(3):
        part = [None if grad is None else grad.to(kind) for grad in rest]
        rest = [None if r is None or p is None else r - p.float() for r, p in zip(rest, part, strict=True)]
        pulled = tuple(map(widened, pull(node, *part)))
        total = tuple(added(a, b) for a, b in zip(total, pulled, strict=True)) if total else pulled
    return tuple(None if grad is None else grad * scale for grad in total)


def pull_weighted(node: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Jᵀ grads as a function of the node's inputs: ``differentiate`` takes the result."""
    with torch.enable_grad():
        return pull(node, *grads)


def differentiate(
    first: Tensor | None, edge: tuple[Node, int], fixed: Iterable[Node] = (), weights: Tensor | None = None
) -> Tensor | None:
    """d(Σ weights·first)/d(edge), by a nested backward that leaves the graph as it is; None if it is constant there.

    ``fixed`` nodes may themselves depend on ``edge``: the nested run stops at their outputs.
    """
    if first is None or not first.requires_grad:
        return None
    handles = [node.register_prehook(_zeros) for node in fixed if node is not edge[0]]
    weights = torch.ones_like(first) if weights is None else weights
    try:
        (result,) = torch.autograd.grad(first, GradientEdge(*edge), weights, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return result


def _zeros(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


def inputs_of(node: Any) -> list[Node]:
    """The nodes that made the inputs of a node; leaves, which depend on nothing, are left out."""
    return [child for child, _ in node.next_functions if child is not None and not hasattr(child, "variable")]


def added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of two terms, either of which may be missing."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def reduced(curvature: Tensor | None, shape: torch.Size | None) -> Tensor | None:
    """Summed over places an input was broadcast to; expanded where an output was reduced and f'' is constant."""
    if curvature is None or shape is None or curvature.shape == shape:
        return curvature
    return curvature.expand(torch.broadcast_shapes(curvature.shape, shape)).sum_to_size(shape)


def through_softmax(q: Tensor, s: Tensor | None, g: Tensor | None, dim: int = -1) -> Tensor | None:
    """The curvature of x in q = softmax(x):  q²(s − 2qs + Σ q²s) + q(1 − 2q)(g − Σ qg).

    That is  q(q Σ q²s + (1 − 2q)(qs + g − Σ qg)), which takes fewer sweeps.
    """
    if s is None and g is None:
        return None
    qs = None if s is None else q * s
    inner = added(qs, None if g is None else g - (q * g).sum(dim, keepdim=True))
    assert inner is not None
    result = torch.addcmul(inner, q, inner, value=-2)
    if qs is not None:
        result.addcmul_(q, (q * qs).sum(dim, keepdim=True))
    return result.mul_(q)
