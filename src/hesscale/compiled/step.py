"""``hesscale.compile``: steps that keep one compiled graph for each kind of call, and write what comes out of it."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from .. import leaves
from ..backward import Missing
from ..columns.dial import Rank, checked_rank
from ..errors import SITE
from ..fast.workspace import lending, use_workspace, workspace_of
from ..graph import plain_mode, storage_id, torch_backward
from ..plan import method_named
from ..walk import INFERENCE
from .backend import Guard, lowered, replace_allocator, settings_of_mode
from .call import LOOKED_INTO, Call, call_of
from .facts import Facts, facts_of
from .kind import Kind, Pass, kind_of
from .result import Result
from .tracing import trace_call
from .written_graph import constants, overwritten, overwritten_constants

_LOG: Final = logging.getLogger("hesscale.compile")
_KEPT: Final = 16  # graphs of one step
_MANY: Final = 8  # compilations after which something is wrong
_SLOW: Final = 10.0  # seconds after which a word is due
_ASKED: Final = ("is_due", "asked")
_TRACING: Final = threading.RLock()  # torch traces one function at a time

_NOT_A_MODULE = "model must be a torch.nn.Module, not {kind}"
_DDP = (
    "hesscale.compile does not compile DistributedDataParallel: run this model with hesscale.backward or "
    f"optimizer.backward(loss), which work under it ({SITE}/distributed.html)"
)
_SHARDED = (
    "hesscale.compile does not compile parameters that are spread over processes (DTensor, fully_shard): run this "
    f"model with hesscale.backward or optimizer.backward(loss), which work with them ({SITE}/distributed.html)"
)
_COMPILED = (
    "the model, or a part of it, was compiled by torch.compile already: pass the one inside it "
    "(compiled_model._orig_mod)"
)
_SAMPLE = "missing='sample' cannot be compiled: register a rule, or pass missing='exact'"
_SIZES = "rank= tells examples apart by their number, which dynamic=True leaves open: pass one of the two"
_SHARED = (
    "loss_fn or the model writes to a tensor in place that shares its memory with another argument, parameter, "
    "buffer or tensor of its closure, which cannot be compiled: take a clone of one of them"
)


def compile(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    *,
    method: str = "hesscale",
    output: Callable[..., Any] | None = None,
    missing: Missing = "raise",
    rank: Rank = 0,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool = False,
) -> Step:
    """A function ``step(*batch)`` that runs ``loss_fn(model, *batch)``, its gradient and its curvature, compiled.

    It returns what ``loss_fn`` returns, the loss or a tuple that begins with it, without a graph, and fills ``p.grad``
    and ``p.curvature`` as ``hesscale.backward(loss)`` does; the same for tensors of the batch that require grad.
    ``method``, ``rank`` and ``missing`` as there ("raise" or "exact"); ``output`` picks the network's output from what
    ``loss_fn`` returns: ``output=lambda loss, logits: logits``. ``backend``, ``mode`` and ``options`` as in
    ``torch.compile``, and so ``dynamic``: one graph for all sizes of the batch, as far as it can be had. Each new kind
    of call (shapes, training or not, frozen parameters, ...) is traced and compiled when it first comes;
    ``logging.getLogger("hesscale.compile")`` says why.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> step = hesscale.compile(lambda model, x: model(x).square().mean(), model, backend="eager")
    >>> loss = step(torch.tensor([[1.0, 3.0]]))
    >>> model.weight.curvature
    tensor([[ 2., 18.]])
    """
    return Step(loss_fn, model, Settings(method, output, missing, rank, backend, mode, dict(options or {}), dynamic))


@dataclass(frozen=True)
class Settings:
    """How a step is compiled."""

    method: str
    output: Callable[..., Any] | None
    missing: Missing
    rank: Rank
    backend: str | Callable[..., Any]
    mode: str | None
    options: Mapping[str, Any]
    dynamic: bool

    @property
    def for_inductor(self) -> dict[str, Any]:
        """Its own settings: those of the mode, and those given."""
        return {**settings_of_mode(self.mode, self.dynamic), **self.options}


class Program(NamedTuple):
    """A compiled graph."""

    run: Callable[..., Sequence[Tensor]]
    result: Result
    fits: Guard  # whether it holds for a batch of its kind
    constants: frozenset[int]  # memory that belongs to the graph
    copies: bool  # what it returns is overwritten by its next run
    overwritten: tuple[int, ...]  # which of its inputs it writes to
    overwritten_constants: frozenset[int]  # likewise, as memory


@final
class Step:
    """A compiled pass. ``compilations`` counts how many graphs were made so far."""

    def __init__(self, loss_fn: Callable[..., Any], model: nn.Module, settings: Settings) -> None:
        _refuse(model, settings)
        self.loss_fn, self.model, self.settings = loss_fn, model, settings
        self.is_due: Callable[[], bool] = _always  # whether curvature is; else a plain pass runs
        self.asked: Callable[[], tuple[str, Rank]] | None = None  # for which method and rank, if not those of settings
        self._forget()

    def _forget(self) -> None:
        self.compilations = 0
        self._names: set[str] = set()  # of attributes that any code reads
        self._programs: OrderedDict[Kind, list[Program]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """All but the graphs, which hold tensors: a copy reads and writes its own, and compiles anew."""
        return {name: value for name, value in vars(self).items() if name in ("loss_fn", "model", "settings", *_ASKED)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Nothing is compiled yet."""
        vars(self).update(state)
        self._forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``loss_fn(model, *args, **kwargs)`` returns; gradients and curvature are filled."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(INFERENCE)
        call = call_of(self.model, args, kwargs)
        kind, facts = self._kind(call)
        program = next((one for one in self._programs.get(kind, ()) if one.fits(call.batch)), None)
        if program is None:
            program = self._compiled(kind, call, facts)
        self._programs.move_to_end(kind)
        inputs = call.inputs
        _refuse_shared(inputs, program)
        for leaf, is_reached in zip(call.leaves, program.result.reached, strict=True):
            if is_reached:
                leaves.drop_if_cleared(leaf)  # its memory may serve again
        with plain_mode(), _memory_of(inputs):
            tensors = program.run(*inputs)
            return self._written(program, call, tensors, kind.computed.method)

    def _kind(self, call: Call) -> tuple[Kind, Facts]:
        settings = self.settings
        method, rank = (settings.method, settings.rank) if self.asked is None else self.asked()
        arguments = (("argument", value) for value in call.values if isinstance(value, LOOKED_INTO))
        around = (("loss_fn", self.loss_fn), ("output", settings.output), *arguments)
        facts = facts_of(self.model, around, self._names)
        computed, rules = Pass(self.is_due(), method, rank), method_named(method).rules.version
        return kind_of(call, facts, computed, rules=rules, dynamic=settings.dynamic), facts

    def _compiled(self, kind: Kind, call: Call, facts: Facts) -> Program:
        self._say_why(kind)
        settings = replace(self.settings, method=kind.computed.method, rank=kind.computed.rank)
        _refuse(self.model, settings)
        options = {"method": settings.method, "missing": settings.missing, "rank": settings.rank}
        with _TRACING, _word_when_slow():
            traced = trace_call(
                self.loss_fn,
                self.model,
                call,
                facts,
                with_curvature=kind.computed.curvature,
                output=settings.output,
                options=options,
                dynamic=settings.dynamic,
            )
            _LOG.info("traced %d operations; compiling with %s", len(traced.module.graph.nodes), settings.backend)
            tuning = settings.for_inductor
            with plain_mode():
                run = lowered(traced.module, traced.inputs, settings.backend, tuning)
        if settings.backend == "inductor":
            replace_allocator(lending)
        program = Program(
            run=run,
            result=traced.result,
            fits=traced.guard,
            constants=frozenset(map(storage_id, constants(traced.module))),
            copies=bool(tuning.get("triton.cudagraphs")),
            overwritten=overwritten(traced.module),
            overwritten_constants=overwritten_constants(traced.module),
        )
        self._keep(kind, program)
        return program

    def _keep(self, kind: Kind, program: Program) -> None:
        self.compilations += 1
        self._programs.setdefault(kind, []).insert(0, program)
        del self._programs[kind][_KEPT:]
        if len(self._programs) > _KEPT:
            self._programs.popitem(last=False)

    def _say_why(self, kind: Kind) -> None:
        if not self._programs:
            _LOG.info("tracing %s for the first time", _name(self.loss_fn))
            return
        reason = kind.difference(next(reversed(self._programs))) or "sizes of the batch"
        level = logging.WARNING if self.compilations == _MANY else logging.INFO
        _LOG.log(level, "tracing %s again (%d times so far): %s", _name(self.loss_fn), self.compilations, reason)

    def _written(self, program: Program, call: Call, tensors: Sequence[Tensor], method: str) -> Any:
        """Gives leaves their gradient and curvature, and returns what loss_fn does."""
        result = program.result
        count = result.count
        reached = [leaf for leaf, is_reached in zip(call.leaves, result.reached, strict=True) if is_reached]
        grads, curvatures = tensors[count : count + len(reached)], tensors[count + len(reached) :]
        taken = {*program.constants, *map(storage_id, call.inputs)}
        returned = [_own(t, taken, program.copies) for t in tensors[:count]]
        if program.copies:
            taken.update(map(storage_id, tensors))
        _accumulate(reached, grads, taken)
        for leaf, s in zip(reached, curvatures, strict=False):
            leaves.add(leaf, leaves.owned(s, leaf, taken), method=method)
        return result.restored(returned)


def _always() -> bool:
    return True


def _own(tensor: Tensor, taken: set[int], copies: bool) -> Tensor:
    """A tensor of its own that shares no memory with what is taken, and is taken itself from now on."""
    if copies or storage_id(tensor) in taken:
        tensor = tensor.clone()
    taken.add(storage_id(tensor))
    return tensor


def _has_hooks(leaf: Tensor) -> bool:
    hooks = (getattr(leaf, "_backward_hooks", None) or {}).values()
    return any(hook is not leaves.before_accumulation for hook in hooks) or bool(
        getattr(leaf, "_post_accumulate_grad_hooks", None)
    )


@contextmanager
def _undone_on_error(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Gradients are what they were if a hook raises."""
    before = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]
    try:
        yield
    except BaseException:
        for leaf, grad, values in before:
            leaf.grad = grad if grad is None or values is None else grad.copy_(values)
        raise


def _accumulate(reached: Sequence[Tensor], grads: Sequence[Tensor], taken: set[int]) -> None:
    """As torch does at the end of a backward pass; where there are hooks, torch itself does it."""
    pairs = [*zip(reached, grads, strict=True)]
    hooked = [(leaf, grad) for leaf, grad in pairs if _has_hooks(leaf)]
    with _undone_on_error([leaf for leaf, _ in hooked]):
        if hooked:
            torch_backward(*map(list, zip(*hooked, strict=True)))  # type: ignore[arg-type]
    for leaf, grad in pairs:
        if _has_hooks(leaf):
            continue
        if leaf.grad is None:
            leaf.grad = leaves.owned(grad, leaf, taken)
        else:
            leaf.grad.add_(grad)


def _refuse(model: nn.Module, settings: Settings) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(_NOT_A_MODULE.format(kind=type(model).__name__))
    method_named(settings.method)  # or an error
    if checked_rank(settings.rank) and settings.dynamic:
        raise ValueError(_SIZES)
    if settings.missing == "sample":
        raise ValueError(_SAMPLE)
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        raise ValueError(_COMPILED)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise NotImplementedError(_DDP)
    if any(hasattr(p, "to_local") for p in model.parameters()):
        raise NotImplementedError(_SHARDED)


def _refuse_shared(inputs: Sequence[Tensor], program: Program) -> None:
    """Each input was a tensor of its own while tracing: what is written to one must not show up in another."""
    if not program.overwritten and not program.overwritten_constants:
        return
    users = Counter((*map(storage_id, inputs), *program.constants))
    written = (*(storage_id(inputs[index]) for index in program.overwritten), *program.overwritten_constants)
    if any(users[memory] > 1 for memory in written):
        raise ValueError(_SHARED)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


@contextmanager
def _memory_of(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Large results go where those of earlier calls lay."""
    before = use_workspace(workspace_of(inputs[0]) if inputs else None)
    try:
        yield
    finally:
        use_workspace(before)


@contextmanager
def _word_when_slow() -> Iterator[None]:
    timer = threading.Timer(_SLOW, _LOG.warning, ["still compiling: once for each kind of batch, up to minutes"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
