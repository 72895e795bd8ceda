"""From a model and a loss function to one graph: loss, gradients and curvature as a function of tensors alone.

The graph is what torch's operations were while the ordinary pass ran once, on tensors without values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from ..backward import NO_GRAPH, derivatives
from ..graph import LEAF, graph_of
from .backend import Guard, stand_ins, value_errors, without_mkldnn
from .bound import Bound
from .call import Call, refuse_views
from .facts import Facts
from .restoring import left_as_it_was
from .result import Result, taken_apart
from .watching import ValueOfConstantError, Watch, Withheld
from .written_graph import constants, holds_generator, relaxed

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
_AS_KEYS = (
    "loss_fn or the model looks parameters up in a set or dict that has them as keys, and while it is compiled others "
    "stand in for them: look them up by name, or note on each what is to be known (p.decay = False)"
)
_SYMBOLS = (
    "an operation needs a size or a number that is not known while it is compiled ({error}): leave dynamic=True out, "
    "compute with masks instead of selecting by them, or call hesscale.backward instead"
)


@dataclass(frozen=True)
class Traced:
    """A graph, before it is compiled."""

    module: torch.fx.GraphModule
    result: Result
    inputs: Sequence[Tensor]  # without values
    guard: Guard  # of the batch: whether the graph holds for it


def trace_call(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    call: Call,
    facts: Facts,
    *,
    with_curvature: bool,
    output: Callable[..., Any] | None,
    options: Mapping[str, Any],
    dynamic: bool = False,
) -> Traced:
    """The graph of a call. With ``dynamic`` it holds for other sizes of the batch as well.

    ``facts`` have met whatever loss_fn may leave something in. Nothing is left there.

    A graph takes ``call.inputs``, writes to buffers, and returns a tuple: the tensors of what loss_fn returns, one
    gradient for each leaf that is reached, and as many curvatures.
    """
    _refuse_parameters_as_keys(facts, model)
    results: list[Result] = []
    bound = Bound(loss_fn, model, [one for one in facts.met.values() if isinstance(one, nn.Module)])
    state = [*call.parameters.values(), *call.buffers.values()]
    inputs, guard = stand_ins(state, call.batch) if dynamic else stand_ins(call.inputs)
    watch = Watch(call.leaves, inputs)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        given, args, kwargs, leaves = _unpack(call, inputs)
        with torch.enable_grad():
            state = {f"{_MODEL}.{name}": tensor for name, tensor in given.items()}
            returned = functional_call(bound, state, (args, kwargs, watch.over(leaves)))
        before = _nodes_so_far()
        loss = _loss_of(returned)
        _refuse_strangers(loss, leaves)
        grads, curvatures = _pass(loss, leaves, with_curvature, _outputs(output, returned), options)
        _refuse_sparse(grads)
        _refuse_redrawn(before)
        result, tensors = taken_apart(returned, tuple(grad is not None for grad in grads))
        results.append(result)
        return *tensors, *(t for t in (*grads, *curvatures) if t is not None)

    with left_as_it_was(facts), watch.undone(), _traceable():
        module = _write_down(run, inputs, dynamic=dynamic)
        watch.refuse_state(constants(module))
    refuse_views(constants(module))
    if holds_generator(module):  # made and seeded in loss_fn, compiled calls would draw on instead of again
        raise RuntimeError(_GENERATOR)
    return Traced(relaxed(module), results[-1], inputs, guard())


def _refuse_parameters_as_keys(facts: Facts, model: nn.Module) -> None:
    known = {*map(id, model.parameters())}
    kinds = (set, frozenset, Mapping)
    if any(id(key) in known for one in facts.met.values() if isinstance(one, kinds) for key in one):
        raise ValueError(_AS_KEYS)


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


def _leaf(stand_in: Tensor, like: Tensor, leaves: list[Tensor]) -> Tensor:
    """The stand-in, dressed like ``like``; if that requires grad an alias, noted among the leaves, where it stops."""
    if like.requires_grad:
        stand_in = stand_in.detach().requires_grad_()
        leaves.append(stand_in)
    vars(stand_in).update(vars(like))
    if like.requires_grad:
        vars(stand_in)["curvature"] = Withheld()
    if isinstance(like, nn.Parameter):
        stand_in._is_param = True
    return stand_in


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


def _refuse_strangers(loss: Tensor, leaves: Sequence[Tensor]) -> None:
    known = {id(leaf) for leaf in leaves}
    for node in graph_of(loss).nodes:
        variable: Any = getattr(node, "variable", None) if node.name() == LEAF else None
        if variable is not None and id(variable) not in known:
            raise ValueError(_STRANGER.format(shape=tuple(variable.shape)))


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
