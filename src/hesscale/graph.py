"""PyTorch's autograd graph as plain data. The only file that knows how nodes are wired, called, hooked and freed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

Edge = tuple[Node, int]
"""A tensor of the graph: the node that made it and which of the node's outputs it is."""

LEAF = "torch::autograd::AccumulateGrad"

_FREED = (
    "Part of this graph was freed by an earlier backward pass. Run the forward pass again, "
    "or pass retain_graph=True to every backward before the last one."
)
_COMPLEX = "hesscale works on real tensors only, and this graph holds a complex one (made by {name})."


@dataclass(frozen=True)
class Graph:
    """What lies between one tensor and the tensors whose curvature is wanted."""

    root: Edge
    order: tuple[Node, ...]  # each node after all nodes that consume its output
    shapes: dict[Node, tuple[torch.Size, ...]]  # of a node's outputs
    dtypes: dict[Node, tuple[torch.dtype, ...]]  # of a node's outputs
    edges: dict[Node, tuple[Edge | None, ...]]  # inputs of a node; None where nothing wanted lies behind
    wanted: dict[Node, tuple[torch.Size | None, ...]]  # shapes of those inputs
    consumers: dict[Node, int]  # how many edges lead to a node


def edge_of(tensor: Tensor) -> Edge:
    """The graph edge a tensor stands for; a leaf's edge leads to the node that accumulates its ``.grad``."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def trace(root: Edge, targets: Sequence[Edge] | None = None) -> Graph:
    """The graph from ``root`` to ``targets`` (to all leaves if None), in an order fit for one sweep."""
    inputs, arriving = _discover(root[0])
    order = _consumers_first(root[0], inputs, arriving)
    useful = _leading_to(targets, order, inputs) if targets is not None else None
    outputs = {node: _outputs(node) for node in order}
    shapes = {node: tuple(torch.Size(output.shape) for output in outputs[node]) for node in order}
    dtypes = {node: tuple(output.dtype for output in outputs[node]) for node in order}
    edges: dict[Node, tuple[Edge | None, ...]] = {}
    wanted: dict[Node, tuple[torch.Size | None, ...]] = {}
    for node in order:
        kept = tuple(
            (child, nr) if child is not None and (useful is None or (child, nr) in useful) else None
            for child, nr in inputs[node]
        )
        edges[node] = kept
        wanted[node] = tuple(None if edge is None else shapes[edge[0]][edge[1]] for edge in kept)
    kept_order = tuple(order) if useful is None else tuple(node for node in order if any(edges[node]))
    return Graph(root, kept_order, shapes, dtypes, edges, wanted, arriving)


def _discover(root: Node) -> tuple[dict[Node, Any], dict[Node, int]]:
    inputs: dict[Node, Any] = {}
    arriving = {root: 0}
    stack = [root]
    while stack:
        node = stack.pop()
        inputs[node] = node.next_functions
        for child, _ in inputs[node]:
            if child is None:
                continue
            if child not in arriving:
                arriving[child] = 0
                stack.append(child)
            arriving[child] += 1
    return inputs, arriving


def _consumers_first(root: Node, inputs: dict[Node, Any], arriving: dict[Node, int]) -> list[Node]:
    waiting = dict(arriving)
    ready = [root]
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for child, _ in inputs[node]:
            if child is not None:
                waiting[child] -= 1
                if not waiting[child]:
                    ready.append(child)
    return order


def _leading_to(targets: Iterable[Edge], order: list[Node], inputs: dict[Node, Any]) -> set[Edge]:
    """All edges that are a target or have one behind them."""
    useful = set(targets)
    working: set[Node] = set()
    for node in reversed(order):
        if any(child is not None and ((child, nr) in useful or child in working) for child, nr in inputs[node]):
            working.add(node)
    useful.update((child, nr) for node in order for child, nr in inputs[node] if child in working)
    return useful


def _outputs(node: Any) -> Sequence[Any]:
    """Something with the shape and dtype of each output of a node."""
    outputs = (leaf_of(node),) if node.name() == LEAF else node._input_metadata
    for output in outputs:
        if output.dtype.is_complex:
            raise TypeError(_COMPLEX.format(name="a leaf" if node.name() == LEAF else node.name()))
    return outputs


def leaf_of(node: Any) -> Tensor:
    """The tensor whose ``.grad`` an AccumulateGrad node writes."""
    variable: Tensor = node.variable
    return variable


def behind(edges: Iterable[Edge]) -> set[Node]:
    """All nodes the given edges were computed by."""
    found: set[Node] = set()
    stack = [node for node, _ in edges]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(child for child, _ in node.next_functions if child is not None)
    return found


def prepare_saved(graph: Graph) -> None:
    """Raises if a node's saved tensors are gone, and lets checkpointed ones be read by a rule and by torch.

    Looks without unpacking, which might recompute a checkpoint.
    """
    for node in graph.order:
        for name in _saved_names(type(node)):
            try:
                raw = getattr(node, name)
                for packed in raw if isinstance(raw, (tuple, list)) else (raw,):
                    if packed.data is None:
                        getattr(node, name.replace("_raw", "", 1))  # None if it was not needed, raises if it was freed
                    elif not isinstance(packed.data, Tensor):
                        _allow_second_reading(packed.data)
            except RuntimeError:
                raise RuntimeError(_FREED) from None


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


class _Kept(dict[int, Any]):
    """The recomputed tensors of a checkpoint, which forgets each after the first reading; torch's is the second."""

    def __setitem__(self, task: int, handle: Any) -> None:
        if handle is not None or task not in self:
            super().__setitem__(task, handle)


def _allow_second_reading(packed: Any) -> None:
    handles = getattr(packed, "handles", None)  # torch.utils.checkpoint's holder; other hooks can be read repeatedly
    if isinstance(handles, dict) and not isinstance(handles, _Kept):
        packed.handles = _Kept(handles)


def on_arrival(node: Node, action: Callable[[Sequence[Tensor | None]], None]) -> Any:
    """Calls ``action(grads)`` just before the node runs; returns a handle with ``remove()``."""
    return node.register_prehook(action)


def when_backward_ends(action: Callable[[], None]) -> None:
    """Queues ``action`` for the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def running_backward() -> int:
    """An id of the backward pass that is running, unique in this process; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def running_backward_frees() -> bool:
    """Whether the running backward pass frees the graph behind itself (no retain_graph)."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()
