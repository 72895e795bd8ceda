"""What is watched while ``loss_fn`` runs on tensors without values: whatever would be baked in, or lost, unseen.

Tensors with values, met while tracing, are those of a closure, of a plain attribute, of a module outside the model.
They are constants of the graph by identity: what is written to them later is seen. So their values must not be asked
for, which would make Python numbers of them for good, and what is written to them must not stay, since the compiled
call writes it again. Gradients and curvature are no inputs of a graph, and seeds no operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..traced import untraced
from .backend import as_one_node, has_values, is_left_over

_DATA = (
    "loss_fn or the model sets x.data, which cannot be compiled: write in place (x.data.copy_(...), x.data.clamp_(...))"
)
_STATE = (
    "loss_fn or the model reads or clears the gradient or curvature of a parameter or argument, which is no input of a "
    "compiled pass: do so outside of it, or pass a copy as an argument"
)
_FROZEN = "loss_fn or the model sets requires_grad of a parameter or argument: do so before the step is called"
_BACKWARD = "loss_fn or the model runs backward, which cannot be compiled: use torch.autograd.grad there"
_SEEDED = (
    "loss_fn or the model seeds torch's random numbers, which a compiled pass would not do again: seed before the step "
    "is called, or pass what is drawn as an argument"
)
_KEPT = (
    "loss_fn or the model keeps a tensor that it has computed while it was compiled before (in a cache, such as "
    "functools.lru_cache), and which has no values: clear the cache, and fill it before the step is called"
)
_PACKED = (
    "loss_fn or the model calls pack_padded_sequence, whose result has sizes that depend on data, which are not known "
    "while it is compiled: run the recurrent layer on the padded batch and mask its output, or call hesscale.backward"
)

_READS: Final = frozenset(("numpy", "tolist", "__array__"))  # which no dispatcher sees
_ASKS: Final = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_FIELDS: Final[Any] = Tensor  # descriptors, seen from the class
_SETS_DATA: Final = _FIELDS.data.__set__
_GRADIENT: Final = (_FIELDS.grad.__get__, _FIELDS.grad.__set__, _FIELDS.grad.__delete__)
_SETS_REQUIRES_GRAD: Final = (_FIELDS.requires_grad.__set__, _FIELDS.requires_grad_)


class ValueOfConstantError(RuntimeError):
    """The value of such a tensor was asked for."""


@final
class Withheld:
    """The curvature of a parameter while ``loss_fn`` is traced: it is there, and every use of it is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(_STATE)

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise RuntimeError(_STATE)


@final
class Watch:
    """One trace. ``over(leaves)`` is the context for ``loss_fn``: with the leaves that stand in for ``leaves`` here."""

    def __init__(self, leaves: Sequence[Tensor], stand_ins: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._writes = _Writes(stand_ins[0] if stand_ins else None)

    @contextmanager
    def over(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Refuses what must not happen within; real tensors are given back what they were by ``undone``."""
        with _Questions({*map(id, self._leaves), *map(id, leaves)}), self._writes:
            yield
        if any(leaf.grad is not None for leaf in leaves):
            raise RuntimeError(_BACKWARD)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Real tensors and their gradients are in the end what they were.

        The end is that of the whole trace: gradients read what the forward pass has saved.
        """
        state, grads = torch.get_rng_state(), [leaf.grad for leaf in self._leaves]
        try:
            yield
            if self._writes.seeds.are_others():
                torch.set_rng_state(state)
                raise RuntimeError(_SEEDED)
            if any(leaf.grad is not grad for leaf, grad in zip(self._leaves, grads, strict=True)):
                raise RuntimeError(_STATE)
        finally:
            self._writes.undo()
            for leaf, grad in zip(self._leaves, grads, strict=True):
                if leaf.grad is not grad:
                    leaf.grad = grad

    def refuse_state(self, constants: Iterable[Tensor]) -> None:
        """RuntimeError if a graph holds somebody's gradient or curvature, or something of a graph before it."""
        state = {id(kept) for leaf in self._leaves for kept in (leaf.grad, getattr(leaf, "curvature", None))}
        for constant in constants:
            if id(constant) in state:
                raise RuntimeError(_STATE)
            if not has_values(constant):
                raise RuntimeError(_KEPT)


@final
class _Questions(TorchFunctionMode):
    """Refuses what no dispatcher sees."""

    def __init__(self, leaves: set[int]) -> None:
        super().__init__()
        self._leaves = leaves

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(function, "__name__", ""), args[0] if args else None
        if name in _READS and has_values(given):
            raise ValueOfConstantError
        if name == "_pack_padded_sequence":
            raise RuntimeError(_PACKED)
        if function == _SETS_DATA:
            raise RuntimeError(_DATA)
        if id(given) in self._leaves:
            if function in _GRADIENT:
                raise RuntimeError(_STATE)
            if function in _SETS_REQUIRES_GRAD:
                raise RuntimeError(_FROZEN)
        if name == "interpolate":  # with symbolic sizes torch sums gathers instead, whose cross terms would be dropped
            with as_one_node():
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


@final
class _Seeds:
    """The seed of torch's random numbers. What others draw in the meantime, in threads of their own, is no matter."""

    def __init__(self) -> None:
        self._seed, self._is_fresh = torch.initial_seed(), _is_fresh()

    def are_others(self) -> bool:
        """Whether random numbers have been seeded since."""
        with untraced():
            return torch.initial_seed() != self._seed or (_is_fresh() and not self._is_fresh)


def _is_fresh() -> bool:
    """Whether nothing has been drawn since random numbers were seeded."""
    return torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(torch.initial_seed()).get_state())


@final
class _Writes(TorchDispatchMode):
    """Keeps a copy of every real tensor before an operation writes to it, and refuses to tell values."""

    def __init__(self, stand_in: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seeds = _Seeds()
        self._stand_in = stand_in
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _ASKS and any(map(has_values, args)):
            raise ValueOfConstantError
        if self._stand_in is not None and any(is_left_over(one, self._stand_in) for one in tree_leaves((args, kwargs))):
            raise RuntimeError(_KEPT)
        if torch.Tag.nondeterministic_seeded in function.tags and self.seeds.are_others():
            raise RuntimeError(_SEEDED)
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in filter(has_values, tree_leaves(given)):
                    self._keep(tensor)
        return function(*args, **kwargs)

    def _keep(self, tensor: Tensor) -> None:
        if id(tensor) not in self._before:
            with untraced(), torch.no_grad():
                self._before[id(tensor)] = tensor, tensor.detach().clone()

    def undo(self) -> None:
        """Makes all of them what they were."""
        with untraced(), torch.no_grad():
            for tensor, before in reversed(self._before.values()):
                tensor.detach().copy_(before)
