"""PyTorch's autograd graph as plain data. The only file that knows how nodes are wired, called, hooked and freed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

Edge = tuple[Node, int]
"""A tensor of the graph: the node that made it and which of the node's outputs it is."""

Link = tuple[int, int]
"""An edge by the place of its node in ``Graph.nodes``."""

Row = tuple[str, type, tuple[Link | None, ...], tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]]
"""All there is to know of a node without the node: name, class, inputs, and shape, dtype and device of each output."""

LEAF = "torch::autograd::AccumulateGrad"

_FREED = (
    "Part of this graph was freed by an earlier backward pass. Run the forward pass again, "
    "or pass retain_graph=True to every backward before the last one."
)
_COMPLEX = "hesscale works on real tensors only, and this graph holds a complex one (made by {name})."


@dataclass(frozen=True)
class Graph:
    """Everything behind one tensor. The rows repeat from pass to pass of a model, the nodes are new each time."""

    nodes: tuple[Node, ...]  # by place; the root's is 0
    rows: tuple[Row, ...]
    places: Mapping[Node, int]

    def link(self, edge: Edge) -> Link:
        """The edge by place; KeyError if it is not part of this graph."""
        return self.places[edge[0]], edge[1]

    def edge(self, link: Link) -> Edge:
        """The edge by node."""
        return self.nodes[link[0]], link[1]


@dataclass(frozen=True)
class Wiring:
    """What lies between one tensor and the tensors whose curvature is wanted, by place."""

    names: tuple[str, ...]
    order: tuple[int, ...]  # each place after all places that consume its output
    shapes: tuple[tuple[torch.Size, ...], ...]  # of a node's outputs
    dtypes: tuple[tuple[torch.dtype, ...], ...]  # of a node's outputs
    edges: tuple[tuple[Link | None, ...], ...]  # inputs of a node; None where nothing wanted lies behind
    wanted: tuple[tuple[torch.Size | None, ...], ...]  # shapes of those inputs
    consumers: tuple[int, ...]  # how many edges lead to a node


def edge_of(tensor: Tensor) -> Edge:
    """The graph edge a tensor stands for; a leaf's edge leads to the node that accumulates its ``.grad``."""
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def trace(root: Node) -> Graph:
    """The whole graph behind ``root``."""
    places = {root: 0}
    nodes: list[Any] = [root]
    rows: list[Row] = []
    for node in nodes:  # grows while it is read
        inputs: list[Link | None] = []
        for child, nr in node.next_functions:
            if child is None:
                inputs.append(None)
                continue
            place = places.get(child)
            if place is None:
                place = places[child] = len(nodes)
                nodes.append(child)
            inputs.append((place, nr))
        name = node.name()
        outputs = (leaf_of(node),) if name == LEAF else node._input_metadata
        rows.append((name, type(node), tuple(inputs), tuple([(tuple(o.shape), o.dtype, o.device) for o in outputs])))
    return Graph(tuple(nodes), tuple(rows), places)


def wire(rows: Sequence[Row], targets: Sequence[Link] | None = None) -> Wiring:
    """The graph from its root to ``targets`` (to all leaves if None), in an order fit for one sweep."""
    for name, _, _, outputs in rows:
        if any(dtype.is_complex for _, dtype, _ in outputs):
            raise TypeError(_COMPLEX.format(name="a leaf" if name == LEAF else name))
    inputs = [row[2] for row in rows]
    consumers = [0] * len(rows)
    for link in (link for links in inputs for link in links if link is not None):
        consumers[link[0]] += 1
    order = _consumers_first(inputs, consumers)
    useful = None if targets is None else _leading_to(targets, order, inputs)
    shapes = tuple(tuple(torch.Size(shape) for shape, _, _ in row[3]) for row in rows)
    edges = tuple(tuple(link if useful is None or link in useful else None for link in links) for links in inputs)
    wanted = tuple(tuple(None if link is None else shapes[link[0]][link[1]] for link in links) for links in edges)
    return Wiring(
        names=tuple(row[0] for row in rows),
        order=tuple(place for place in order if useful is None or any(edges[place])),
        shapes=shapes,
        dtypes=tuple(tuple(dtype for _, dtype, _ in row[3]) for row in rows),
        edges=edges,
        wanted=wanted,
        consumers=tuple(consumers),
    )


def _consumers_first(inputs: Sequence[Sequence[Link | None]], consumers: Sequence[int]) -> list[int]:
    waiting = list(consumers)
    ready, order = [0], []
    while ready:
        place = ready.pop()
        order.append(place)
        for link in inputs[place]:
            if link is not None:
                waiting[link[0]] -= 1
                if not waiting[link[0]]:
                    ready.append(link[0])
    return order


def _leading_to(targets: Iterable[Link], order: Sequence[int], inputs: Sequence[Sequence[Link | None]]) -> set[Link]:
    """All edges that are a target or have one behind them."""
    useful = set(targets)
    working: set[int] = set()
    for place in reversed(order):
        if any(link is not None and (link in useful or link[0] in working) for link in inputs[place]):
            working.add(place)
    useful.update(link for links in inputs for link in links if link is not None and link[0] in working)
    return useful


def leaf_of(node: Any) -> Tensor:
    """The tensor whose ``.grad`` an AccumulateGrad node writes."""
    variable: Tensor = node.variable
    return variable


def behind(links: Iterable[Link], rows: Sequence[Row]) -> set[int]:
    """The places of all nodes the given edges were computed by."""
    found: set[int] = set()
    stack = [place for place, _ in links]
    while stack:
        place = stack.pop()
        if place not in found:
            found.add(place)
            stack.extend(link[0] for link in rows[place][2] if link is not None)
    return found


def prepare_saved(nodes: Iterable[Node]) -> bool:
    """Raises if a node's saved tensors are gone, and lets checkpointed ones be read by a rule and by torch.

    Returns whether all of them can be read at any time: checkpoints and offloading bring a tensor back when torch
    comes to it, sharded training fills an empty one. Looks without unpacking, which might recompute a checkpoint.
    """
    at_any_time = True
    for node in nodes:
        for name in _saved_names(type(node)):
            try:
                raw = getattr(node, name)
                for packed in raw if isinstance(raw, (tuple, list)) else (raw,):
                    data = packed.data
                    if data is None:
                        getattr(node, name.replace("_raw", "", 1))  # None if it was not needed, raises if it was freed
                    elif packed.unpack_hook is not None:
                        _allow_second_reading(data)
                        at_any_time = False
                    elif data.layout is torch.strided and not data.untyped_storage().nbytes():
                        at_any_time = False
            except RuntimeError:
                raise RuntimeError(_FREED) from None
    return at_any_time


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


def running_backward_accumulates(leaf: Node) -> bool:
    """Whether the running backward pass is going to write the ``.grad`` of this leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad does not say, and writes no .grad
        return False
