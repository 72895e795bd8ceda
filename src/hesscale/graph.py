"""The one door to torch's insides: how nodes are wired, read, called, hooked and freed.

Names that torch does not document, and what happens without them. Needed, or the import says so with torch's version:

- ``Node.next_functions``, ``Node._input_metadata``, ``Node._saved_*``, ``Node.variable``: the graph itself
- ``Engine.queue_callback``: writing curvature when torch has written gradients
- ``TorchDispatchMode``, ``tree_map``: running a node of half precision in single precision
- ``_current_graph_task_id``, ``_current_autograd_node``, ``_will_engine_execute_node``: which pass is running, where
  it starts and what it is going to write

Not needed; everything else works without them (tests/test_graph.py takes them away):

- ``Node._raw_saved_*``, ``SavedTensor.unpack_hook``: finding freed tensors before anything has changed, and knowing
  half precision that only a saved tensor has
- ``_functorch.is_functorch_wrapped_tensor``: refusing torch.func's transforms in one sentence
- ``UntypedStorage._cdata``: telling whether two tensors share memory; without it data pointers do
- ``_storage_Use_Count``: only speed; without it no scratch memory is kept
- ``Function._forward_cls``: finding the rule of a ``torch.autograd.Function`` by its class; by its name otherwise, and
  nobody sees which of them hide a graph
- what is known of checkpoints is in recomputing.py, of numbers while tracing in traced.py, what only sharded training
  needs in fsdp.py, and what only compiled regions need in compiled/torch_compiler.py
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .errors import COMPLEX, MissingRuleError
from .recomputing import is_to_be_recomputed, same_recomputation
from .recomputing import running_backward as running_backward

Edge = tuple[Node, int]
"""A tensor of the graph: the node that made it and which of the node's outputs it is."""

Link = tuple[int, int]
"""An edge by the place of its node in ``Graph.nodes``."""

Row = tuple[str, type, tuple[Link | None, ...], tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]]
"""All there is to know of a node without the node: name, class, inputs, and shape, dtype and device of each output."""

Result = TypeVar("Result")

LOW_PRECISION: Final = frozenset((torch.bfloat16, torch.float16))
LEAF = "torch::autograd::AccumulateGrad"

_FREED = (
    "Part of this graph was freed by an earlier backward pass. Run the forward pass again, "
    "or pass retain_graph=True to every backward before the last one."
)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of curvature for tensors of this one: half precision has it in single."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


REQUIRED: Final = ("_current_graph_task_id", "_current_autograd_node", "_will_engine_execute_node")


def refuse_without(*names: str) -> None:
    """ImportError where torch lacks one of these names."""
    missing = [name for name in names if not hasattr(torch._C, name)]
    if missing:
        raise ImportError(f"hesscale does not work with torch {torch.__version__}: it has no {', '.join(missing)}")


refuse_without(*REQUIRED)

torch_backward: Final = torch.autograd.backward
"""Torch's own, also while an optimizer is armed."""

storage_users: Final[Callable[[int], int] | None] = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors share the storage with this ``storage_id``."""

WEIGHT_NORM: Final[Any] = getattr(torch, "_weight_norm", None)
"""What ``weight_norm`` calls; its double backward is wrong (double_backward.py)."""

_is_wrapped: Final[Any] = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)


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


def graph_of(tensor: Tensor) -> Graph:
    """The whole graph behind a tensor."""
    return graph_behind(edge_of(tensor)[0])


def graph_behind(root: Node) -> Graph:
    """The whole graph behind a node."""
    places: dict[Any, int] = {root: 0}
    nodes: list[Any] = [root]
    rows: list[Row] = []
    is_real = True
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
            is_real = is_real and not out.dtype.is_complex
        rows.append((node.name(), type(node), tuple(links), tuple(outputs)))
    return Graph(tuple(nodes), tuple(rows) if is_real else _with_complex_marked(rows), places)


def _with_complex_marked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, with ``COMPLEX`` behind the names of nodes that read or make a complex tensor."""
    made = {place for place, row in enumerate(rows) for _, dtype, _ in row[3] if dtype.is_complex}
    read = {place for place, row in enumerate(rows) if any(link is not None and link[0] in made for link in row[2])}
    marks = (COMPLEX if place in made | read else "" for place in range(len(rows)))
    return tuple((row[0] + mark, *row[1:]) for mark, row in zip(marks, rows, strict=True))


def edge_of(tensor: Tensor | GradientEdge) -> Edge:
    """The graph edge a tensor stands for; a leaf's edge leads to the node that accumulates its ``.grad``."""
    if isinstance(tensor, GradientEdge):
        return tensor.node, tensor.output_nr
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor lives inside a transform of torch.func, which hides its memory."""
    return _is_wrapped is not None and bool(_is_wrapped(tensor))


def storage_id(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    storage = tensor.untyped_storage()
    address: int = getattr(storage, "_cdata", None) or storage.data_ptr()
    return address


def function_of(kind: type) -> Any:
    """The ``torch.autograd.Function`` that nodes of this class come from, if any."""
    return getattr(kind, "_forward_cls", None)


@cache
def _hides_graph(kind: type) -> bool:
    """Whether the backward of this kind of node runs a backward of its own, over a graph that it records itself."""
    backward: Any = getattr(function_of(kind), "backward", None)
    code = getattr(inspect.unwrap(backward), "__code__", None)
    names = set() if code is None else {*code.co_names}
    return "backward" in names and not names.isdisjoint(("autograd", "enable_grad", "set_grad_enabled"))


def hiding(rows: Sequence[Row]) -> Counter[str]:
    """The nodes that hide a graph, by name. Where there are none, what a graph does not lead to is unused."""
    return Counter(name for name, kind, _, _ in rows if _hides_graph(kind))


def refuse_hidden(rows: Sequence[Row]) -> None:
    """Raises if a part of the graph is hidden: nobody could tell what is used there from what is not."""
    hidden = hiding(rows)
    if hidden:
        raise MissingRuleError(hidden, hiding=hidden)


def call(node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Jᵀ grads, by the node's own backward formula: one tensor per input. Nothing is freed and no hook runs.

    Grads of the last outputs may be left out.
    """
    if callable(node):
        result = node(*grads)
        return result if isinstance(result, tuple) else (result,)
    grads = [*grads, *(None,) * (len(node._input_metadata) - len(grads))]
    result = node.apply(*_materialized(node, grads))
    return _of_tensors(node, result if isinstance(result, tuple) else (result,))


def _of_tensors(node: Any, found: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What a Function returns for its tensors alone: it has an entry for every argument, a number or None too."""
    needed = iter([found[index] for index, is_needed in enumerate(node.needs_input_grad) if is_needed])
    return tuple(None if child is None else next(needed) for child, _ in node.next_functions)


@final
class _InSingle(TorchDispatchMode):
    """Whatever an operation reads or is asked to make in half precision is in single precision."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return function(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in LOW_PRECISION:
        return value.float()
    return wide(value) if isinstance(value, torch.dtype) else value


_OUT_OF_SIGHT: Final = "torch::autograd::"
"""How nodes are called that torch writes by hand. Those of writes into slices do not show what they have saved."""


def call_in_single(node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """As ``call``, for a node that works in half precision: its formula in single precision."""
    kind: type = type(node)
    for name in saved_names(kind):  # what has to be recomputed for them is recomputed as it was
        getattr(node, name.replace("_raw", "", 1), None)
    if node.name().startswith(_OUT_OF_SIGHT):
        call(node, grads)
    with _InSingle():  # type: ignore[no-untyped-call]
        return call(node, grads)


def _materialized(node: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Zeros for what is missing, as torch hands them to a custom Function unless it has asked for None."""
    given = [grad for grad in grads if grad is not None]
    if not given or len(given) == len(grads) or _asks_for_none(function_of(type(node))):
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


def nested_gradients(
    outputs: Sequence[Edge], inputs: Sequence[Edge], weights: Sequence[Tensor], *, batched: bool = False
) -> tuple[Tensor | None, ...]:
    """d(Σ weights·outputs) at each of ``inputs``, by a run of torch's engine within a running pass or on its own.

    ``batched``: for several sets of weights at once, which have one dimension more, as has what comes back.
    No walk takes notice (``NESTED.depth``), and what the pass has recomputed for a checkpoint is not computed again.
    """
    NESTED.depth += 1
    try:
        with same_recomputation():
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


def in_own_run(action: Callable[[], Result], like: Tensor) -> Result:
    """What ``action`` returns, within a run of torch's engine over one node.

    Nodes that are called by hand give the gradients of all their inputs there; else they leave out those that the
    running pass has not asked for, and it knows no node that was made since it began.
    """
    found: list[Result] = []
    with torch.enable_grad():
        y = like.new_zeros((), requires_grad=True).clone()
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: found.append(action()))
    NESTED.depth += 1
    try:
        with same_recomputation():
            torch_backward(y)
    finally:
        NESTED.depth -= 1
    return found[0]


@cache
def saved_names(kind: type) -> tuple[str, ...]:
    """What nodes of this class call the tensors that they saved, in the form that does not unpack them."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _saved(node: Any, kind: type) -> Iterator[tuple[str, Any]]:
    for name in saved_names(kind):
        packed = getattr(node, name)
        for one in packed if isinstance(packed, (tuple, list)) else (packed,):
            yield name, one


def recompute(y: Tensor, inputs: Sequence[Tensor]) -> None:
    """Has checkpoints recomputed by a pass of its own, if there are any: within vmap they could not draw numbers."""
    graph = graph_of(y)
    pairs = zip(graph.nodes, graph.rows, strict=True)
    if any(is_to_be_recomputed(one.data) for node, row in pairs for _, one in _saved(node, row[1])):
        nested_gradients([edge_of(y)], [edge_of(x) for x in inputs], [torch.ones_like(y)])


def prepare_saved(graph: Graph) -> set[int]:
    """The places of nodes that work in half precision, or may; raises if a saved tensor is gone.

    Looks without unpacking, which might recompute a checkpoint.
    """
    half: set[int] = set()
    for place, node in enumerate(graph.nodes):
        _, kind, _, outputs = graph.rows[place]
        for _, dtype, _ in outputs:
            if dtype in LOW_PRECISION:
                half.add(place)
        try:
            for name, one in _saved(node, kind):
                data = one.data
                if getattr(one, "unpack_hook", None) is not None:
                    half.add(place)  # there is no telling yet
                elif data is None:
                    getattr(node, name.replace("_raw", "", 1))  # None if it was not needed, raises if it was freed
                elif data.dtype in LOW_PRECISION:
                    half.add(place)
        except RuntimeError:
            raise RuntimeError(_FREED) from None
    return half


def when_backward_ends(action: Callable[[], None]) -> None:
    """Queues ``action`` for the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


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
        for kind in filter(torch.is_autocast_enabled, _CASTING):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what a module returns, however nested."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
