"""What only ``hesscale.compile`` needs of torch's insides: tensors without values, and backends that take a graph.

Names that torch does not document: ``_subclasses.FakeTensorMode``, ``ShapeEnv``, ``_dynamo.lookup_backend``,
``_inductor.compile``, the exceptions of tensors without values, mkldnn's switch, the cache of ``parametrize``, hooks of
all modules and ``_DisablePythonDispatcher``, without which nothing is compiled;
``PyCodeCache.modules`` and ``empty_strided_cpu`` in them, only for speed: without them compiled code allocates afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

_WRONG_AVERAGE = (
    "Inductor computes a wrong gradient of avg_pool2d with ceil_mode=True (torch.compile alone does so too): pass "
    "count_include_pad=False or leave ceil_mode out, or pass backend='aot_eager'"
)

Guard = Callable[[Sequence[Tensor]], bool]
"""Whether what was traced with sizes as symbols holds for these tensors."""


def stand_ins(fixed: Sequence[Tensor], dynamic: Sequence[Tensor] = ()) -> tuple[list[Tensor], Callable[[], Guard]]:
    """Tensors like these without values and memory, no two of which are one, for a tracer to compute with.

    The sizes of those in ``dynamic`` are symbols. When tracing is done, the function returned beside them tells what
    it has taken for granted of those sizes.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    sizes: Any = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=not dynamic)
    with mode:
        found = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in fixed]
    symbolic = [
        mode.from_tensor(
            t.detach(),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * t.dim()),
            source=ConstantSource(f"batch{index}"),
        )
        for index, t in enumerate(dynamic)
    ]

    def guard() -> Guard:
        # static ones too: int(x.shape[0]) or a loop over it makes a number of a symbol
        code = sizes.produce_guards_expression(symbolic, ignore_static=False) if symbolic else None
        return lambda tensors: code is None or bool(sizes.evaluate_guards_expression(code, tensors))

    return [*found, *symbolic], guard


def has_values(value: Any) -> bool:
    """Whether it is a tensor that is no stand-in."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def is_left_over(value: Any, stand_in: Tensor) -> bool:
    """Whether it is the stand-in of another trace than ``stand_in``."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor) and value.fake_mode is not getattr(stand_in, "fake_mode", None)


def cache_of_parametrizations() -> dict[Any, Any]:
    """What ``torch.nn.utils.parametrize.cached()`` keeps."""
    from torch.nn.utils import parametrize

    return parametrize._cache


def hooks_of_all_modules() -> list[int]:
    """The keys of hooks such as ``torch.nn.modules.module.register_module_forward_hook`` sets."""
    from torch.nn.modules import module

    kinds = (module._global_forward_pre_hooks, module._global_forward_hooks)
    return [key for hooks in kinds for key in (*hooks, -1)]


def as_one_node() -> AbstractContextManager[Any]:
    """Within it an operation is recorded by autograd as it is, also where torch would rather take it apart before."""
    guard: AbstractContextManager[Any] = torch._C._DisablePythonDispatcher()
    return guard


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """No kernels of oneDNN: its fused LSTM can be neither differentiated twice nor compiled."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def value_errors() -> tuple[type[Exception], ...]:
    """What is raised where a traced program asks for the value of a tensor."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    names = ("DataDependentOutputException", "DynamicOutputShapeException")
    return GuardOnDataDependentSymNode, *(getattr(fake_tensor, name) for name in names)


def lowered(module: Any, inputs: Sequence[Tensor], backend: Any, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """What a backend of torch.compile makes of a traced module; ``settings`` are Inductor's."""
    import torch._dynamo

    if backend != "inductor":
        found = torch._dynamo.lookup_backend(backend)
        run: Callable[..., Any] = found(module, list(inputs))
        return run
    import torch._inductor

    refuse_wrong(module)
    compiled: Callable[..., Any] = torch._inductor.compile(module, list(inputs), options=dict(settings))
    return compiled


def settings_of_mode(mode: str | None, dynamic: bool) -> dict[str, Any]:
    """What a mode of torch.compile means for Inductor."""
    if mode is None:
        return {}
    import torch._inductor

    found: dict[str, Any] = torch._inductor.list_mode_options(mode, dynamic)
    return found


def refuse_wrong(module: Any) -> None:
    """ValueError where Inductor is known to compute something else, as compared by benchmarks/compiled_agreement.py."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.avg_pool2d_backward.default:
            ceil_mode, count_include_pad, divisor_override = node.args[5:8]
            if ceil_mode and count_include_pad and divisor_override is None:
                raise ValueError(_WRONG_AVERAGE)


def replace_allocator(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    """Makes all code that Inductor has generated so far take its memory on the CPU from ``wrap`` of what it used."""
    from torch._inductor.codecache import PyCodeCache

    for module in getattr(PyCodeCache, "modules", ()):
        allocate = getattr(module, "empty_strided_cpu", None)
        if allocate is not None and not hasattr(allocate, "replaced"):
            module.empty_strided_cpu = wrap(allocate)
            module.empty_strided_cpu.replaced = True
