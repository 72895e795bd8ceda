"""The door to torch's compiler: how operations are written down, split into a forward and a backward, and compiled.

Names that torch does not document: ``fx.experimental.proxy_tensor`` (compiled autograd writes graphs with it, too),
``min_cut_rematerialization_partition`` and ``fx_graph_cse`` (by which AOTAutograd splits a graph), ``_guards`` and
``FakeTensor`` (tensors without values), ``_inductor.compile_fx`` and ``virtualized``, ``_dynamo.lookup_backend``,
Dynamo's counters, mkldnn's switch and ``_DisablePythonDispatcher``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import counters
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.traceback import preserve_node_meta

from ..fast.workspace import lending

Run = Callable[..., Any]

_WRONG_AVERAGE = (
    "Inductor computes a wrong gradient of avg_pool2d with ceil_mode=True (backend='inductor' does so too): pass "
    "count_include_pad=False or leave ceil_mode out, or pass options={'backend': 'aot_eager'}"
)


_SYMBOLS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TENSORS: Final = (Tensor, tuple, list)  # what operations on tensors return
_PLACE: Final = "place"  # under which a node's place is noted


def running_fake_mode() -> Any:
    """The mode in which Dynamo has made the tensors without values of the graph that it is handing over."""
    return TracingContext.get().fake_mode


def guards_so_far(fake_mode: Any) -> int:
    """How many things have been taken for granted of sizes that are symbols."""
    return 0 if fake_mode.shape_env is None else len(fake_mode.shape_env.guards)


def broken_guards(fake_mode: Any, start: int, symbols: Sequence[Any], values: Sequence[Any]) -> list[str]:
    """What has been taken for granted since ``start`` and does not hold for these values."""
    known = {one.node._expr: value for one, value in zip(symbols, values, strict=True) if isinstance(one, _SYMBOLS)}
    found = [guard.expr for guard in fake_mode.shape_env.guards[start:]]
    return [str(expr) for expr in found if expr.xreplace(known) == False]  # noqa: E712 of sympy


def fake_value(fake_mode: Any, value: Any) -> Any:
    """The same without values, where it is a tensor; with those symbols for sizes that Dynamo has chosen."""
    if not isinstance(value, Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is fake_mode):
        return value
    context: Any = TracingContext.get().tensor_to_context.get(value)
    source = None if context is None else context.tensor_source
    return fake_mode.from_tensor(value, symbolic_context=context, source=source)


def one_at_a_time() -> AbstractContextManager[Any]:
    """Torch compiles in one thread at a time: tracing sets marks that all threads see."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def new_tracer() -> Any:
    """What notes operations, and knows which node of its graph each tensor came from."""
    tracer: Any = proxy_tensor.PythonKeyTracer()
    tracer.root = torch.nn.Module()
    tracer.graph = fx.Graph(tracer_cls=proxy_tensor.PythonKeyTracer)
    tracer.tensor_attrs = {}
    return tracer


def placeholder(tracer: Any, value: Any) -> fx.Node:
    """A new input of the graph, which ``value`` stands for from now on."""
    proxy = tracer.create_proxy("placeholder", f"input_{len(tracer.graph.nodes)}", (), {})
    proxy_tensor.track_tensor_tree(value, proxy, constant=None, tracer=tracer)
    node: fx.Node = proxy.node
    return node


def node_of(tracer: Any, value: Any) -> Any:
    """The node that a tensor or a symbol came from; any other value as it is."""
    if isinstance(value, Tensor):
        slot = proxy_tensor.get_proxy_slot(value, tracer, None)
        if slot is None:  # it was made outside
            return tracer.create_arg(value)
        return slot.proxy.node
    if isinstance(value, _SYMBOLS) and value.node.constant is None:
        return proxy_tensor.get_proxy_slot(value, tracer).force().node
    return value


@contextmanager
def writing(tracer: Any, fake_mode: Any, *, symbolic: bool) -> Iterator[None]:
    """Operations are noted in the tracer's graph, and compute shapes only."""
    from torch._functorch._aot_autograd.runtime_wrappers import _disable_saved_tensors_hooks  # needs all of Dynamo

    with ExitStack() as stack:
        stack.enter_context(without_values(fake_mode))
        stack.enter_context(_disable_saved_tensors_hooks())  # those around the call
        if symbolic:
            stack.enter_context(enable_python_dispatcher())
        stack.enter_context(proxy_tensor.ProxyTorchDispatchMode(tracer, "real"))
        stack.enter_context(proxy_tensor.disable_autocast_cache())
        stack.enter_context(preserve_node_meta())
        stack.enter_context(without_mkldnn())
        yield


def as_one_node() -> AbstractContextManager[Any]:
    """Within it an operation is recorded by autograd as it is, also where torch would rather take it apart before."""
    guard: AbstractContextManager[Any] = torch._C._DisablePythonDispatcher()
    return guard


@contextmanager
def without_values(fake_mode: Any) -> Iterator[None]:
    """Operations compute shapes only; numbers that torch keeps as tensors stay what they are."""
    with patch.object(fake_mode, "allow_non_fake_inputs", True), fake_mode:
        yield


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """No kernels of oneDNN: its fused LSTM can be neither differentiated twice nor compiled."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def functional(
    run: Run, fake_mode: Any, primals: Sequence[Any], tangents: Sequence[Any], backend: str
) -> fx.GraphModule:
    """The graph of ``run(primals, tangents)`` without writes, in the operations that the backend knows best."""
    table: Mapping[Any, Any] = {}
    if backend == "inductor":
        from torch._inductor import compile_fx, decomposition

        assert compile_fx  # decompositions do not import all that they need
        table = {**decomposition.select_decomp_table(), torch.ops.aten.bernoulli.p: _bernoulli}

    def joint(primals: Any, tangents: Any) -> Any:  # partitioners know inputs by these names
        return run(primals, tangents)

    is_symbolic = any(not isinstance(value, Tensor) for value in primals)
    dispatcher = enable_python_dispatcher() if is_symbolic else nullcontext()
    with (
        torch.no_grad(),
        without_values(fake_mode),
        dispatcher,
        tracing(TracingContext(fake_mode)),
        preserve_node_meta(),
    ):
        traced = torch.func.functionalize(joint, remove="mutations")
        module = proxy_tensor.make_fx(traced, decomposition_table=dict(table))(list(primals), list(tangents))
    module.graph = fx_graph_cse(module.graph)
    return module


def _bernoulli(like: Tensor, p: float = 0.5, *, generator: Any = None) -> Tensor:
    """As dropout draws it. On CPUs Inductor writes into memory, which its loops may have read before (torch 2.13)."""
    return (torch.rand_like(like, dtype=torch.float32) < p).to(like.dtype)


def label_so_far() -> None:
    """Gives the nodes that have been noted so far, in the graph that is being written, their ``label``."""
    mode: Any = proxy_tensor.get_proxy_mode()
    made = (node for node in mode.tracer.graph.nodes if isinstance(node.meta.get("val"), _TENSORS))
    for place, node in enumerate(node for node in made if node.op != "placeholder"):
        node.meta[_PLACE] = place


def results_of(module: fx.GraphModule) -> list[Any]:
    """What the graph returns: nodes, numbers, or None."""
    results: Any = module.graph.output_node().args[0]
    return list(results)


def is_recomputable(node: fx.Node) -> bool:
    """Whether AOTAutograd might compute it a second time: views and element-wise operations."""
    return isinstance(node.meta.get("val"), _SYMBOLS) or get_default_op_list().is_recomputable(node)


def is_random(node: fx.Node) -> bool:
    """Whether it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def label(node: fx.Node) -> Any:
    """What a node is called in all functional graphs that begin alike: its place among tensors, or its symbols.

    None for what comes after that beginning.
    """
    value = node.meta.get("val")
    if isinstance(value, _SYMBOLS):
        return str(value.node.expr)
    return node.meta.get(_PLACE, node.name if node.op == "placeholder" else None)


def partitioned(module: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a functional joint graph, with what is cheaper to compute again than to keep."""
    return min_cut_rematerialization_partition(module, None, num_fwd_outputs=outputs)


def lowered(
    module: fx.GraphModule, fake_mode: Any, backend: str, options: Mapping[str, Any], *, visible: int | None = None
) -> tuple[Run, list[Any]]:
    """What a backend makes of a functional graph, and how it lays out its results, where that is not as they were.

    Only the first ``visible`` results have to keep their layout (all if None); ``options`` are Inductor's.
    """
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    # where AOTAutograd has counted one more, Dynamo's optimizer for DDP looks in its own context for what it has left
    with tracing(TracingContext(fake_mode)), patch.dict(counters["aot_autograd"]):
        if backend != "inductor":
            return compiled_by(backend, module, values, options), []
        with TracingContext.report_output_strides() as strides:
            return _by_inductor(module, values, fake_mode, options, visible), strides or []


def _by_inductor(
    module: fx.GraphModule, values: Sequence[Any], fake_mode: Any, options: Mapping[str, Any], visible: int | None
) -> Run:
    from torch._inductor import compile_fx, config
    from torch._inductor.virtualized import V

    _refuse_wrong(module)
    results = results_of(module)
    with V.set_fake_mode(fake_mode), config.patch(dict(options)), torch.no_grad():
        module = compile_fx._recursive_joint_graph_passes(module) or module  # in place in older versions of torch
        seen = [index for index, node in enumerate(results[:visible]) if isinstance(node, fx.Node)]
        module.graph.output_node().meta["user_visible_output_idxs"] = seen
        code = compile_fx.compile_fx_inner(module, list(values), is_backward=visible is None)
    if not visible and os.environ.get("HESSCALE_PLAIN") != "1":
        _lend_memory()
    return lambda *inputs: code([*inputs])


def _lend_memory() -> None:
    """Makes all code that Inductor has generated for CPUs so far take memory from the workspace of the running pass.

    A curvature pass over 16 layers of 512 units takes 1.2 (batch 32) and 1.4 (batch 1) of a plain one, not 1.8 and 3.3.
    """
    from torch._inductor.codecache import PyCodeCache

    modules: list[Any] = PyCodeCache.modules
    for module in modules:
        allocate = getattr(module, "empty_strided_cpu", None)
        if allocate is not None and not hasattr(allocate, "lends"):
            module.empty_strided_cpu = lending(allocate)
            module.empty_strided_cpu.lends = True


def _refuse_wrong(module: fx.GraphModule) -> None:
    """ValueError where Inductor is known to compute something else, as compared by benchmarks/compiled_agreement.py."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.avg_pool2d_backward.default):
        ceil_mode, count_include_pad, divisor_override = node.args[5:8]
        if ceil_mode and count_include_pad and divisor_override is None:
            raise ValueError(_WRONG_AVERAGE)


def compiled_by(backend: str, module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Run:
    """What a backend of torch.compile makes of a graph."""
    import torch._dynamo

    if backend != "inductor":
        other: Run = torch._dynamo.lookup_backend(backend)(module, list(inputs))
        return other
    import torch._inductor

    run: Run = torch._inductor.compile(module, list(inputs), options=dict(options))
    return run


def settings_of_mode(mode: str | None) -> dict[str, Any]:
    """What a mode of torch.compile means for Inductor."""
    if mode is None:
        return {}
    import torch._inductor

    found: dict[str, Any] = torch._inductor.list_mode_options(mode)
    return found
