"""The only file that knows torch's insides: how nodes are wired, read, called, hooked and freed.

Names that torch does not document, what they are for, and what happens without them (``_require`` says so at import):

- ``Node.next_functions``, ``Node._input_metadata``, ``Node._saved_*``: the graph itself, without which there is no pass
- ``Node._raw_saved_*``: finding freed tensors before anything has changed, and reading a checkpoint twice; without
  them torch's own error comes later, in the middle of a pass
- ``Engine.queue_callback``: writing curvature when torch has written gradients
- ``_current_graph_task_id``, ``_current_autograd_node``, ``_will_engine_execute_node``: which pass is running, where
  it starts and where it ends; an attached loss needs them
- ``_get_graph_exec_group``, ``_set_graph_exec_group``: second derivatives inside a checkpoint read what the pass has
  recomputed; without them it is computed again, which selective checkpoints refuse
- ``_functorch.is_functorch_wrapped_tensor``: refusing torch.func's transforms, which would fail otherwise
- ``_storage_Use_Count`` (fast/workspace.py): only speed; without it no scratch memory is kept
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .errors import COMPLEX

Edge = tuple[Node, int]
"""A tensor of the graph: the node that made it and which of the node's outputs it is."""

Link = tuple[int, int]
"""An edge by the place of its node in ``Graph.nodes``."""

Row = tuple[str, type, tuple[Link | None, ...], tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]]
"""All there is to know of a node without the node: name, class, inputs, and shape, dtype and device of each output."""

LOW_PRECISION: Final = frozenset((torch.bfloat16, torch.float16))
LEAF = "torch::autograd::AccumulateGrad"

_FREED = (
    "Part of this graph was freed by an earlier backward pass. Run the forward pass again, "
    "or pass retain_graph=True to every backward before the last one."
)


def _require(*names: str) -> None:
    missing = [name for name in names if not hasattr(torch._C, name)]
    if missing:
        raise ImportError(f"hesscale does not work with torch {torch.__version__}: it has no {', '.join(missing)}")


_require("_current_graph_task_id", "_current_autograd_node", "_will_engine_execute_node")


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


def trace(root: Node) -> Graph:
    """The whole graph behind ``root``."""
    places: dict[Any, int] = {root: 0}
    nodes: list[Any] = [root]
    rows: list[Row] = []
    for node in nodes:  # grows while it is read
        links: list[Link | None] = []
        for child, nr in node.next_functions:
            if child is None:
                links.append(None)
                continue
            place = places.get(child)
            if place is None:
                place = places[child] = len(nodes)
                nodes.append(child)
            links.append((place, nr))
        outputs = []
        for out in node._input_metadata:
            outputs.append((tuple(out.shape), out.dtype, out.device))
        rows.append((node.name(), type(node), tuple(links), tuple(outputs)))
    return Graph(tuple(nodes), _with_complex_marked(rows), places)


def _with_complex_marked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, with ``COMPLEX`` behind the names of nodes that read or make a complex tensor."""
    made = {place for place, row in enumerate(rows) for _, dtype, _ in row[3] if dtype.is_complex}
    if not made:
        return tuple(rows)
    read = {place for place, row in enumerate(rows) if any(link is not None and link[0] in made for link in row[2])}
    marks = (COMPLEX if place in made | read else "" for place in range(len(rows)))
    return tuple((row[0] + mark, *row[1:]) for mark, row in zip(marks, rows, strict=True))


def edge_of(tensor: Tensor) -> Edge:
    """The graph edge a tensor stands for; a leaf's edge leads to the node that accumulates its ``.grad``."""
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor lives inside a transform of torch.func, which hides its memory."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def leaf_of(node: Any) -> Tensor:
    """The tensor whose ``.grad`` an AccumulateGrad node writes."""
    variable: Tensor = node.variable
    return variable


def call(node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Jᵀ grads, by the node's own backward formula: one tensor per input. Nothing is freed and no hook runs."""
    result = node(*grads) if callable(node) else node.apply(*_materialized(node, grads))
    return result if isinstance(result, tuple) else (result,)


def _materialized(node: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Zeros for what is missing, as torch hands them to a custom Function unless it has asked for None."""
    given = [grad for grad in grads if grad is not None]
    if not given or len(given) == len(grads) or _asks_for_none(type(node)._forward_cls):
        return grads
    pairs = zip(grads, node._input_metadata, strict=True)
    return [given[0].new_zeros(tuple(output.shape)) if grad is None else grad for grad, output in pairs]


def _asks_for_none(function: Any) -> bool:
    """Whether the code of a Function says ``ctx.set_materialize_grads``; a node keeps that to itself."""
    codes = (getattr(method, "__code__", None) for method in (function.forward, function.setup_context))
    return any(code is not None and "set_materialize_grads" in code.co_names for code in codes)


@final
class _Nested(threading.local):
    depth = 0


NESTED: Final = _Nested()


def nested_gradient(y: Tensor, edge: Edge, weights: Tensor) -> Tensor | None:
    """d(Σ weights·y)/d(edge) by torch's engine, within a running pass; None if y does not depend on it."""
    return nested_gradients([edge_of(y)], [edge], [weights])[0]


def nested_gradients(
    outputs: Sequence[Edge], inputs: Sequence[Edge], weights: Sequence[Tensor], *, batched: bool = False
) -> tuple[Tensor | None, ...]:
    """d(Σ weights·outputs) at each of ``inputs``, by a run of torch's engine within a running pass or on its own.

    ``batched``: for several sets of weights at once, which have one dimension more, as has what comes back.
    No walk takes notice (``NESTED.depth``), and what the pass has recomputed for a checkpoint is not computed again.
    """
    group: Any = getattr(torch._C, "_get_graph_exec_group", lambda: None)()
    set_group: Any = getattr(torch._C, "_set_graph_exec_group", lambda group: None)
    if group is None and running_backward() >= 0:
        set_group(running_backward())
    NESTED.depth += 1
    try:
        return torch.autograd.grad(
            [GradientEdge(*edge) for edge in outputs],
            [GradientEdge(*edge) for edge in inputs],
            weights,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )
    finally:
        NESTED.depth -= 1
        set_group(group)


@cache
def saved_names(kind: type) -> tuple[str, ...]:
    """What nodes of this class call the tensors that they saved, in the form that does not unpack them."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def prepare_saved(graph: Graph) -> set[int]:
    """The places of nodes that work in half precision, or may; raises if a saved tensor is gone.

    Also lets checkpointed tensors be read twice, by a rule and by torch. Looks without unpacking, which might recompute
    a checkpoint.
    """
    half: set[int] = set()
    for place, node in enumerate(graph.nodes):
        _, kind, _, outputs = graph.rows[place]
        for _, dtype, _ in outputs:
            if dtype in LOW_PRECISION:
                half.add(place)
        try:
            for name in saved_names(kind):
                packed = getattr(node, name)
                for one in packed if isinstance(packed, (tuple, list)) else (packed,):
                    if _is_half(one, node, name):
                        half.add(place)
        except RuntimeError:
            raise RuntimeError(_FREED) from None
    return half


def _is_half(packed: Any, node: Any, name: str) -> bool:
    data = packed.data
    if packed.unpack_hook is not None:
        _allow_second_reading(data)
        return True  # there is no telling yet
    if data is None:
        getattr(node, name.replace("_raw", "", 1))  # None if it was not needed, raises if it was freed
        return False
    return data.dtype in LOW_PRECISION


class _Kept(dict[int, Any]):
    """The recomputed tensors of a checkpoint, which forgets each after the first reading; torch's is the second."""

    def __setitem__(self, task: int, handle: Any) -> None:
        if handle is not None or task not in self:
            super().__setitem__(task, handle)


def _allow_second_reading(packed: Any) -> None:
    handles = getattr(packed, "handles", None)  # torch.utils.checkpoint's holder; other hooks can be read repeatedly
    if isinstance(handles, dict) and not isinstance(handles, _Kept):
        packed.handles = _Kept(handles)


def on_arrival(node: Node, action: Callable[[Sequence[Tensor | None]], Any]) -> Any:
    """Calls ``action(grads)``, which may replace them, just before the node runs; returns a handle to ``remove()``."""
    return node.register_prehook(action)


def when_backward_ends(action: Callable[[], None]) -> None:
    """Queues ``action`` for the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def running_backward() -> int:
    """An id of the backward pass that is running, unique in this process; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def running_node() -> Node:
    """The node whose hooks are running."""
    node: Node = torch._C._current_autograd_node()
    return node


def running_backward_accumulates(leaf: Node) -> bool:
    """Whether the running backward pass is going to write the ``.grad`` of this leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad does not say, and writes no .grad
        return False


_CASTING: Final = ("cpu", "cuda")


def is_plain_mode() -> bool:
    """Whether torch neither records nor casts."""
    return not torch.is_grad_enabled() and not any(map(torch.is_autocast_enabled, _CASTING))


@contextmanager
def plain_mode() -> Iterator[None]:
    """Rules record nothing, and compute in the precision of what they are given."""
    with torch.no_grad(), ExitStack() as stack:
        for kind in _CASTING:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
