"""From a model and a loss function to one graph: loss, gradients and curvature as a function of tensors alone.

The graph is what torch's operations were while the ordinary pass ran once, on tensors without values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from ..backward import NO_GRAPH, derivatives
from ..graph import LEAF, edge_of, storage_id, trace
from .backend import Guard, stand_ins, value_errors, without_mkldnn
from .call import Call
from .facts import objects_around
from .real import ValueOfConstantError, left_alone

_MODEL: Final = "model"
_VALUES = (
    "loss_fn or the model asks for the value of a tensor (.item(), bool(tensor), if or while on a tensor, or an "
    "operation whose result has a size that depends on data), which is not known while it is compiled: compute with "
    "tensors (torch.where), pass the value as an argument that is no tensor, or call hesscale.backward instead"
)
_GENERATOR = (
    "loss_fn or the model draws from a torch.Generator, which cannot be compiled: leave generator= out and call "
    "torch.manual_seed, or pass what is drawn as an argument"
)
_REDRAWN = (
    "the model draws random numbers (dropout) within torch.utils.checkpoint, and a compiled pass would draw others "
    "when it recomputes them: leave the checkpoint or the dropout out, or call hesscale.backward instead"
)
_SPARSE = "a parameter gets a sparse gradient, which cannot be compiled: build its embedding with sparse=False"
_NO_LOSS = "loss_fn must return the loss, a tensor of one element, or a tuple that begins with it, not {found}"
_STRANGER = (
    "the loss depends on a tensor of shape {shape} that requires grad but is neither a parameter of the model nor an "
    "argument: make it one of the two, or detach it"
)
_CHANGED = "the forward pass replaces the buffer {name!r} by one of another shape or dtype, which cannot be compiled"
_APPEARED = (
    "the forward pass adds or removes the buffer {name!r}, which cannot be compiled: run the model once before, or "
    "register the buffer as a tensor"
)
_HIDDEN = (
    "loss_fn returns a {kind} that holds tensors, which cannot be compiled: return them in tuples, lists or dicts, or "
    "register the class with torch.utils._pytree"
)
_SYMBOLS = (
    "an operation needs a size or a number that is not known while it is compiled ({error}): leave dynamic=True out, "
    "compute with masks instead of selecting by them, or call hesscale.backward instead"
)


@dataclass(frozen=True)
class Result:
    """What comes out of a graph beside its tensors: how many leaves are reached, and what loss_fn returns."""

    reached: tuple[bool, ...]  # for each leaf
    values: tuple[_Constant | _Tensor, ...]  # what loss_fn returns
    structure: Any

    @property
    def count(self) -> int:
        """Of the tensors among what loss_fn returns."""
        return sum(isinstance(value, _Tensor) for value in self.values)

    def restored(self, tensors: Sequence[Tensor]) -> Any:
        """What loss_fn returns, made of its tensors."""
        rest = iter(tensors)
        values = [value.value if isinstance(value, _Constant) else value.read(next(rest)) for value in self.values]
        return pytree.tree_unflatten(values, self.structure)


@dataclass(frozen=True)
class Traced:
    """A graph, before it is compiled."""

    module: torch.fx.GraphModule
    result: Result
    inputs: Sequence[Tensor]  # without values
    guard: Guard  # of the batch: whether the graph holds for it
    overwritten: tuple[int, ...]  # which of the inputs the graph writes to


@dataclass(frozen=True)
class _Constant:
    value: Any


@dataclass(frozen=True)
class _Tensor:
    """A tensor, or a number that depends on data or on sizes of the batch, and leaves the graph as one."""

    is_number: bool

    def read(self, tensor: Tensor) -> Any:
        return tensor.item() if self.is_number else tensor


class _Bound(nn.Module):
    """A loss function as a module, so that torch can put other tensors in the place of the model's."""

    def __init__(self, loss_fn: Callable[..., Any], model: nn.Module) -> None:
        super().__init__()
        self.loss_fn, self.model = loss_fn, model

    def forward(self, args: Any, kwargs: Any, given: Mapping[str, Tensor], guarded: AbstractContextManager[Any]) -> Any:
        before = _buffer_names(self.model)
        with guarded:
            result = self.loss_fn(self.model, *args, **kwargs)
        for name in before ^ _buffer_names(self.model):
            raise ValueError(_APPEARED.format(name=name))
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in given and buffer is not given[name]:
                    _replace(name, given[name], buffer)
        return result


def _buffer_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_buffers(remove_duplicate=False)}


def _replace(name: str, buffer: Tensor, found: Tensor) -> None:
    if buffer.shape != found.shape or buffer.dtype is not found.dtype:
        raise ValueError(_CHANGED.format(name=name))
    buffer.copy_(found)


def trace_call(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    call: Call,
    *,
    with_curvature: bool,
    output: Callable[..., Any] | None,
    options: Mapping[str, Any],
    dynamic: bool = False,
) -> Traced:
    """The graph of a call. With ``dynamic`` it holds for other sizes of the batch as well.

    A graph takes ``call.inputs``, writes to buffers, and returns a tuple: the tensors of what loss_fn returns, one
    gradient for each leaf that is reached, and as many curvatures.
    """
    results: list[Result] = []
    bound = _Bound(loss_fn, model)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        given, args, kwargs, leaves = _unpack(call, inputs)
        with torch.enable_grad():
            state = {f"{_MODEL}.{name}": tensor for name, tensor in given.items()}
            returned = functional_call(bound, state, (args, kwargs, given, guarded))
        before = _nodes_so_far()
        loss = _loss_of(returned)
        _refuse_strangers(loss, leaves)
        grads, curvatures = _pass(loss, leaves, with_curvature, _outputs(output, returned), options)
        _refuse_sparse(grads)
        _refuse_redrawn(before)
        found, structure = pytree.tree_flatten(returned)
        reached = tuple(grad is not None for grad in grads)
        kept = tuple(map(_kept, found))
        results.append(Result(reached, kept, structure))
        tensors = [_as_tensor(value) for value, how in zip(found, kept, strict=True) if isinstance(how, _Tensor)]
        return *tensors, *(t for t in (*grads, *curvatures) if t is not None)

    state = [*call.parameters.values(), *call.buffers.values()]
    inputs, guard = stand_ins(state, call.batch) if dynamic else stand_ins(call.inputs)
    with _left_as_it_was(_open_objects(loss_fn, model, call)), left_alone() as guarded, _traceable():
        module = _write_down(run, inputs, dynamic=dynamic)
    _refuse_generators(module)
    return Traced(_relaxed(module), results[-1], inputs, guard(), _overwritten(module))


def _unpack(call: Call, inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], Any, Any, list[Tensor]]:
    """The model's tensors by name, the arguments for loss_fn, and the leaves among both."""
    leaves: list[Tensor] = []
    rest = iter(inputs)
    given = dict(zip([*call.parameters, *call.buffers], rest, strict=False))
    for name, tensor in (*call.parameters.items(), *call.buffers.items()):
        given[name] = _leaf(given[name], tensor, leaves)
    values = [_leaf(next(rest), v, leaves) if isinstance(v, Tensor) else v for v in call.values]
    args, kwargs = pytree.tree_unflatten(values, call.structure)
    return given, args, kwargs, leaves


def _write_down(run: Callable[..., Any], inputs: Sequence[Tensor], *, dynamic: bool) -> torch.fx.GraphModule:
    """The graph of what it does with such inputs."""
    mode: Literal["symbolic", "fake"] = "symbolic" if dynamic else "fake"
    try:
        return make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    except NotImplementedError as error:
        if "Generator" not in str(error):  # older versions of torch cannot even write such a call down
            raise
        raise RuntimeError(_GENERATOR) from error
    except RuntimeError as error:
        if "SymInt" not in str(error):
            raise
        raise RuntimeError(_SYMBOLS.format(error=str(error).splitlines()[0])) from error


def _relaxed(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph, in which views may become copies, wherever nothing is written to their memory afterwards.

    A backend may lay tensors out otherwise than they were while tracing (Inductor does so with ``cat``), and a view
    that was one then need not be one any more.
    """
    written: set[int | None] = set()
    for node in reversed(module.graph.nodes):
        if node.target is torch.ops.aten.view.default and _memory(node) not in written:
            node.target = torch.ops.aten.reshape.default
        if hasattr(node.target, "_schema"):
            written.update(_written_by(node))
    module.recompile()
    return module


def _written_by(node: torch.fx.Node) -> Iterator[int | None]:
    schema: Any = node.target._schema  # type: ignore[union-attr]
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield _memory(value)
    yield from (_memory(node.kwargs[a.name]) for a in schema.arguments if a.is_out and a.name in node.kwargs)


def _overwritten(module: torch.fx.GraphModule) -> tuple[int, ...]:
    written = {memory for node in module.graph.nodes if hasattr(node.target, "_schema") for memory in _written_by(node)}
    inputs = (node for node in module.graph.nodes if node.op == "placeholder")
    return tuple(index for index, node in enumerate(inputs) if _memory(node) in written)


def _memory(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return storage_id(value) if isinstance(value, Tensor) else None


_NUMBERS: Final[Mapping[type, torch.dtype]] = {
    torch.SymInt: torch.int64,
    torch.SymFloat: torch.float64,
    torch.SymBool: torch.bool,
}


def _kept(value: Any) -> _Constant | _Tensor:
    is_number = type(value) in _NUMBERS
    if is_number or isinstance(value, Tensor):
        return _Tensor(is_number)
    held = value if isinstance(value, (set, frozenset)) else getattr(value, "__dict__", ())
    if any(isinstance(one, Tensor) or type(one) in _NUMBERS for one in pytree.tree_leaves(_listed(held))):
        raise TypeError(_HIDDEN.format(kind=type(value).__name__))
    return _Constant(value)


def _listed(held: Any) -> list[Any]:
    return list(held.values() if isinstance(held, Mapping) else held)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.full((), value, dtype=_NUMBERS[type(value)])


def _leaf(stand_in: Tensor, like: Tensor, leaves: list[Tensor]) -> Tensor:
    """An alias that requires grad if ``like`` does, noted among the leaves; a gradient stops at it."""
    if not like.requires_grad:
        return stand_in
    leaves.append(stand_in.detach().requires_grad_())
    return leaves[-1]


def _loss_of(returned: Any) -> Tensor:
    loss = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if not isinstance(loss, Tensor):
        raise TypeError(_NO_LOSS.format(found=f"a {type(returned).__name__}"))
    if loss.numel() != 1:
        raise TypeError(_NO_LOSS.format(found=f"one of shape {tuple(loss.shape)}"))
    if not loss.requires_grad:
        raise RuntimeError(NO_GRAPH)
    return loss


def _outputs(output: Callable[..., Any] | None, returned: Any) -> Any:
    if output is None:
        return None
    return output(*returned) if isinstance(returned, (tuple, list)) else output(returned)


def _pass(
    loss: Tensor, leaves: Sequence[Tensor], with_curvature: bool, output: Any, options: Mapping[str, Any]
) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    if with_curvature:
        return derivatives(loss, leaves, output=output, **options)
    return torch.autograd.grad(loss, leaves, allow_unused=True), ()


def _nodes_so_far() -> set[str]:
    """The names of what has been traced up to now."""
    mode: Any = get_proxy_mode()
    return {node.name for node in mode.tracer.graph.nodes}


def _refuse_redrawn(before: set[str]) -> None:
    """Only a checkpoint draws while gradients are computed; the random signs of ``rank=`` are ``randint``."""
    mode: Any = get_proxy_mode()
    for node in mode.tracer.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and node.name not in before and "randint" not in str(node.target):
            raise RuntimeError(_REDRAWN)


def _refuse_sparse(grads: Sequence[Tensor | None]) -> None:
    if any(grad is not None and grad.layout is not torch.strided for grad in grads):
        raise ValueError(_SPARSE)


def _refuse_generators(module: torch.fx.GraphModule) -> None:
    """Where one was made and seeded in ``loss_fn``, compiled calls would draw on instead of again."""
    for node in module.graph.nodes:
        given = (
            [getattr(module, str(node.target), None)] if node.op == "get_attr" else [*node.args, *node.kwargs.values()]
        )
        if any(isinstance(value, torch.Generator) for value in given):
            raise RuntimeError(_GENERATOR)


def _refuse_strangers(loss: Tensor, leaves: Sequence[Tensor]) -> None:
    known = {id(leaf) for leaf in leaves}
    for node in trace(edge_of(loss)[0]).nodes:
        variable: Any = getattr(node, "variable", None) if node.name() == LEAF else None
        if variable is not None and id(variable) not in known:
            raise ValueError(_STRANGER.format(shape=tuple(variable.shape)))


def _open_objects(loss_fn: Callable[..., Any], model: nn.Module, call: Call) -> Iterator[Any]:
    """Whatever a forward pass may set attributes of."""
    for found in (model, *call.values, *objects_around(loss_fn)):
        if isinstance(found, nn.Module):
            yield from found.modules()
        elif not isinstance(found, Tensor):
            yield found


@contextmanager
def _left_as_it_was(objects: Iterable[Any]) -> Iterator[None]:
    """Whatever a forward pass leaves in them would be tensors without values here, and counts once too often."""
    before = [pair for one in objects for pair in _open_to_change(one)]
    try:
        yield
    finally:
        for own, contents in before:
            own.clear()
            own.update(contents) if isinstance(own, dict) else own.extend(contents)
        torch.clear_autocast_cache()


def _open_to_change(one: Any) -> Iterator[tuple[dict[str, Any] | list[Any], Any]]:
    """Its attributes, and those that are lists or dicts, buffers among them, each with a copy of what is in it."""
    own = getattr(one, "__dict__", {})
    for held in (own, *own.values()):
        if type(held) in (dict, OrderedDict, list):
            yield held, held.copy()


@contextmanager
def _traceable() -> Iterator[None]:
    """Recurrent layers in steps, since Inductor does not know oneDNN's kernel; advice where values are asked for."""
    try:
        with without_mkldnn():
            yield
    except ValueOfConstantError as error:
        raise RuntimeError(_VALUES) from error
    except value_errors() as error:
        raise RuntimeError(_VALUES) from error
