"""What a node's own backward can tell when it is called by hand: first derivatives, and from these second ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..graph import LOW_PRECISION, Edge, call, call_in_single, edge_of, in_own_run
from ..traced import is_traced as is_traced
from ..traced import unwrapped
from ..traced import value_of as value_of


@final
class View:
    """A node as rules see it: what it saved in half precision is read in single, and numbers while tracing as tensors.

    Everything else is the node's own.
    """

    __slots__ = ("is_half", "node")

    def __init__(self, node: Any, *, is_half: bool = True) -> None:
        self.node, self.is_half = node, is_half

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.node, name)
        if isinstance(value, Tensor):
            return widened(unwrapped(value))
        return tuple(map(widened, value)) if isinstance(value, tuple) else value

    def __call__(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return pull(self, *grads)


def widened(value: Any) -> Any:
    """A tensor of half precision in single precision; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value


def number(factor: Any) -> Any:
    """A 0-dim factor on the CPU as a Python number, which leaves the dtype of whatever it multiplies alone.

    Anything else as it is, and so a factor whose value is not known while a pass is traced.
    """
    if not isinstance(factor, Tensor) or factor.dim() or factor.device.type != "cpu":
        return factor
    value = value_of(factor)
    return factor if value is None else value


def pull(node: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Jᵀ grads, one tensor per input of the node. Nothing is freed and no hook runs.

    A node in half precision, seen by a ``View``, computes in single: sums of many terms would lose them otherwise.
    """
    raw, is_half = (node.node, node.is_half) if isinstance(node, View) else (node, False)
    found = call_in_single(raw, grads) if is_half else call(raw, grads)
    for entry in found:
        if entry is not None and entry.dtype in LOW_PRECISION and not is_half:  # it was a cast
            return pull(View(raw), *grads)
        if entry is not None and entry.is_sparse:
            return tuple(t.to_dense() if t is not None and t.is_sparse else t for t in found)
    return found


def pull_weighted(node: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Jᵀ grads as a function of the node's inputs: ``differentiate`` takes the result."""
    with torch.enable_grad():
        return pull(node, *grads)


def differentiate(
    first: Tensor | None, edge: Edge, fixed: Iterable[Node] = (), weights: Tensor | None = None
) -> Tensor | None:
    """d(Σ weights·first)/d(edge), the graph being left as it is; None if it is constant there.

    ``fixed`` nodes may themselves depend on ``edge``; they are not entered. A run of torch's engine would prepare all
    that lies behind them, and cost the depth of the graph: only nodes between ``first`` and ``edge`` are called here.
    """
    if first is None or not first.requires_grad:
        return None
    start = edge_of(first)
    nodes = _between(start, edge, fixed)
    weights = torch.ones_like(first) if weights is None else weights
    if not nodes:
        return weights if start == edge else None
    return in_own_run(lambda: _swept(nodes, {start: weights}).get(edge), weights)


def _between(start: Edge, end: Edge, fixed: Iterable[Node]) -> list[Node]:
    """The nodes on paths between two edges that do not enter ``fixed`` nodes, each after all its consumers."""
    leads: dict[Any, bool] = {**dict.fromkeys(fixed, False), end[0]: False}
    found: list[Node] = []
    stack: list[Any] = [start[0]]
    while stack:
        node = stack[-1]
        inputs = () if node in leads else node.next_functions
        ahead = [child for child, _ in inputs if child is not None and child not in leads]
        if ahead:
            stack += ahead
            continue
        stack.pop()
        if node not in leads:
            leads[node] = any(pair == end or leads.get(pair[0], False) for pair in inputs)
            found += [node] if leads[node] else []
    return found[::-1]


def _swept(nodes: Sequence[Any], arrived: dict[Edge, Tensor]) -> dict[Edge, Tensor]:
    """What arrives behind ``nodes``, each called once with the sum of what has arrived at its outputs.

    Sums, and what an output was broadcast or cast from, are as torch's engine has them.
    """
    for node in nodes:
        grads = [arrived.pop((node, nr), None) for nr in range(len(node._input_metadata))]
        if all(grad is None for grad in grads):
            continue
        for (child, nr), moved in zip(node.next_functions, pull(node, *grads), strict=True):
            if child is not None and moved is not None:
                output = child._input_metadata[nr]
                own = moved.to(output.dtype).sum_to_size(torch.Size(output.shape))
                arrived[child, nr] = own if (child, nr) not in arrived else arrived[child, nr] + own
    return arrived


def inputs_of(node: Any) -> list[Node]:
    """The nodes that made the inputs of a node; leaves, which depend on nothing, are left out."""
    return [child for child, _ in node.next_functions if child is not None and not hasattr(child, "variable")]


def added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of two terms, either of which may be missing."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def sigmoid_slope(x: Tensor) -> Tensor:
    """σ(x)(1 − σ(x)) as σ(x)σ(−x), which keeps its digits where σ is close to one."""
    return torch.sigmoid(x).mul_(torch.sigmoid(-x))


def reduced(curvature: Tensor | None, shape: torch.Size | None) -> Tensor | None:
    """Summed over places an input was broadcast to; expanded where an output was reduced and f'' is constant."""
    if curvature is None or shape is None or curvature.shape == shape:
        return curvature
    return curvature.expand(torch.broadcast_shapes(curvature.shape, shape)).sum_to_size(shape)
