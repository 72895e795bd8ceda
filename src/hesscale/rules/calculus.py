"""What a node's own backward can tell when it is called by hand: first derivatives, and second ones by a nested run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


def pull(node: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Jᵀ grads, one tensor per input of the node. Nothing is freed and no hook runs."""
    result = node(*grads) if callable(node) else node.apply(*grads)
    return result if isinstance(result, tuple) else (result,)


def pull_weighted(node: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Jᵀ grads as a function of the node's inputs: ``differentiate`` takes the result."""
    with torch.enable_grad():
        return pull(node, *grads)


def differentiate(first: Tensor | None, edge: tuple[Node, int], fixed: Iterable[Node] = ()) -> Tensor | None:
    """d(Σ first)/d(edge), by a nested backward that leaves the graph as it is; None where it does not depend on it.

    ``fixed`` nodes may themselves depend on ``edge``: the nested run stops at their outputs.
    """
    if first is None or not first.requires_grad:
        return None
    handles = [node.register_prehook(_zeros) for node in fixed if node is not edge[0]]
    try:
        (result,) = torch.autograd.grad(
            first, GradientEdge(*edge), torch.ones_like(first), retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    return result


def _zeros(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


def added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of two terms, either of which may be missing."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
