"""What ``loss_fn`` returns: which parts of it are tensors that leave a graph, and how they are put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_HIDDEN = (
    "loss_fn returns a {kind} that holds tensors, which cannot be compiled: return them in tuples, lists or dicts, or "
    "register the class with torch.utils._pytree"
)
_NUMBERS: Final[Mapping[type, torch.dtype]] = {
    torch.SymInt: torch.int64,
    torch.SymFloat: torch.float64,
    torch.SymBool: torch.bool,
}


@dataclass(frozen=True)
class Result:
    """What comes out of a graph beside its tensors: which leaves are reached, and what loss_fn returns."""

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
class _Constant:
    value: Any


@dataclass(frozen=True)
class _Tensor:
    """A tensor, or a number that depends on data or on sizes of the batch, and leaves the graph as one."""

    is_number: bool

    def read(self, tensor: Tensor) -> Any:
        return tensor.item() if self.is_number else tensor


def taken_apart(returned: Any, reached: tuple[bool, ...]) -> tuple[Result, list[Tensor]]:
    """What loss_fn has returned, and the tensors in it."""
    found, structure = pytree.tree_flatten(returned)
    values = tuple(map(_kept, found))
    return Result(reached, values, structure), [*_tensors(found, values)]


def _tensors(found: Sequence[Any], values: Sequence[_Constant | _Tensor]) -> Iterator[Tensor]:
    for value, how in zip(found, values, strict=True):
        if isinstance(value, Tensor):
            yield value.detach()
        elif isinstance(how, _Tensor):
            yield torch.full((), value, dtype=_NUMBERS[type(value)])


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
