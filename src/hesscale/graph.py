"""PyTorch's autograd graph as plain data. The only file that knows how nodes are wired, called, hooked and freed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, is_not, itemgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

Edge = tuple[Node, int]
"""A tensor of the graph: the node that made it and which of the node's outputs it is."""

Link = tuple[int, int]
"""An edge by the place of its node in ``Graph.nodes``."""

Row = tuple[str, type, tuple[Link | None, ...], tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]]
"""All there is to know of a node without the node: name, class, inputs, and shape, dtype and device of each output."""

Saved = Sequence[tuple[int, str]]
"""Saved tensors by the place of their node and their name there."""

NOWHERE = -1
"""The place of an input that needs no gradient."""

LEAF = "torch::autograd::AccumulateGrad"

_FREED = (
    "Part of this graph was freed by an earlier backward pass. Run the forward pass again, "
    "or pass retain_graph=True to every backward before the last one."
)
_COMPLEX = "hesscale works on real tensors only, and this graph holds a complex one (made by {name})."


class Columns(NamedTuple):
    """All rows of a graph, column by column: built and compared in a few calls instead of many for each node."""

    names: tuple[str, ...]
    kinds: tuple[type, ...]
    fan_in: tuple[int, ...]  # inputs of each node
    children: tuple[int, ...]  # by place, of one node after the other
    numbers: tuple[int, ...]  # which of a child's outputs
    fan_out: tuple[int, ...]  # outputs of each node
    shapes: tuple[tuple[int, ...], ...]  # of one node's outputs after the other's
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]

    def rows(self) -> tuple[Row, ...]:
        """The same row by row."""
        pairs = zip(self.children, self.numbers, strict=True)
        links = (None if place == NOWHERE else (place, nr) for place, nr in pairs)
        outputs = zip(self.shapes, self.dtypes, self.devices, strict=True)
        return tuple(
            (name, kind, tuple(islice(links, fan_in)), tuple(islice(outputs, fan_out)))
            for name, kind, fan_in, fan_out in zip(self.names, self.kinds, self.fan_in, self.fan_out, strict=True)
        )


@dataclass(frozen=True)
class Graph:
    """Everything behind one tensor. The columns repeat from pass to pass of a model, the nodes are new each time."""

    nodes: tuple[Node, ...]  # by place; the root's is 0
    columns: Columns
    places: Mapping[Node, int]

    @property
    def rows(self) -> tuple[Row, ...]:
        """What is known of the nodes, one by one."""
        return self.columns.rows()

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
    places: dict[Any, int] = {None: NOWHERE, root: 0}
    nodes: list[Any] = [root]
    inputs: list[Any] = []
    for node in nodes:  # grows while it is read
        edges = node.next_functions
        inputs.append(edges)
        for child, _ in edges:
            if child not in places:
                places[child] = len(nodes)
                nodes.append(child)
    outputs = [*map(_outputs, nodes)]
    edges, described = [*chain.from_iterable(inputs)], [*chain.from_iterable(outputs)]
    columns = Columns(
        names=(*map(_name, nodes),),
        kinds=(*map(type, nodes),),
        fan_in=(*map(len, inputs),),
        children=(*map(places.__getitem__, map(_first, edges)),),
        numbers=(*map(_second, edges),),
        fan_out=(*map(len, outputs),),
        shapes=(*map(tuple, map(_shape, described)),),
        dtypes=(*map(_dtype, described),),
        devices=(*map(_device, described),),
    )
    del places[None]
    return Graph((*nodes,), columns, places)


_name = methodcaller("name")
_outputs, _shape, _dtype, _device = map(attrgetter, ("_input_metadata", "shape", "dtype", "device"))
_first, _second = itemgetter(0), itemgetter(1)


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


def saved_names(kind: type) -> tuple[str, ...]:
    """What nodes of this class call the tensors that they saved, in the form that does not unpack them."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def prepare_saved(nodes: Sequence[Any], saved: Saved) -> bool:
    """Raises if a saved tensor is gone, and lets checkpointed ones be read by a rule and by torch.

    ``saved`` says whose they are, and their names. Returns whether all can be read at any time: checkpoints and
    offloading bring a tensor back when torch comes to it, sharded training fills an empty one. Looks without
    unpacking, which might recompute a checkpoint.
    """
    try:
        packed = [getattr(nodes[place], name) for place, name in saved]
        doubtful = saved if _is_hooked(packed) else _not_in_memory(saved, [*map(_data, packed)])
        return False not in [_prepare(nodes[place], name) for place, name in doubtful]  # all are to be prepared
    except RuntimeError:
        raise RuntimeError(_FREED) from None


def _is_hooked(packed: Sequence[Any]) -> bool:
    """Whether there is more to any of them than a tensor; seen at a glance, as it is nearly never so."""
    return not _SAVED.issuperset(map(type, packed)) or not {None}.issuperset(map(_unpack_hook, packed))


def _not_in_memory(saved: Saved, data: Sequence[Any]) -> Saved:
    if not _PLAIN.issuperset(map(type, data)) or not {torch.strided}.issuperset(map(_layout, filter(_is_there, data))):
        return saved
    if 0 in map(_nbytes, map(Tensor.untyped_storage, filter(_is_there, data))):
        return saved
    if all(map(_is_there, data)):
        return ()
    # a node is freed as a whole: where it has one tensor, another that is missing was never there
    alive = {place for (place, _), one in zip(saved, data, strict=True) if one is not None}
    return [pair for pair, one in zip(saved, data, strict=True) if one is None and pair[0] not in alive]


def _prepare(node: Any, name: str) -> bool:
    at_any_time = True
    packed = getattr(node, name)
    for one in packed if isinstance(packed, (tuple, list)) else (packed,):
        data = one.data
        if data is None:
            getattr(node, name.replace("_raw", "", 1))  # None if it was not needed, raises if it was freed
        elif one.unpack_hook is not None:
            _allow_second_reading(data)
            at_any_time = False
        elif data.layout is torch.strided and not data.untyped_storage().nbytes():
            at_any_time = False
    return at_any_time


_unpack_hook, _data, _layout = map(attrgetter, ("unpack_hook", "data", "layout"))
_nbytes, _is_there = torch.UntypedStorage.nbytes, functools.partial(is_not, None)
_SAVED, _PLAIN = {torch._C._autograd.SavedTensor}, {Tensor, torch.nn.Parameter, type(None)}


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
