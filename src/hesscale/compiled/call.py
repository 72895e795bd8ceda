"""What goes into a compiled pass, what of it is refused, and what a graph knows of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .facts import key_of

_TWICE = "a tensor that requires grad is given to the step twice, or is a parameter of the model: give it once"
_NO_LEAF = "an argument or buffer requires grad but is no leaf: detach it, or compute it inside loss_fn"
_OPAQUE = (
    "an argument of the step is a {kind}, of which changes would not be seen: pass tensors, numbers and strings, and "
    "tuples, lists and dicts of these"
)
_LAZY = "the model has parameters without a shape (lazy modules): run it once before its step is called"
_VIEWED = (
    "a tensor that goes into a compiled pass is a {kind}, whose numbers are not those in its memory: take "
    "x.resolve_conj().resolve_neg(), or a dense and padded tensor instead of a sparse or nested one"
)
_SUBCLASS = "an argument of the step is a {kind}, which compiled code would not know as such: pass a plain torch.Tensor"

LOOKED_INTO: Final = (nn.Module, FunctionType, MethodType, partial, type)
"""Arguments of which is seen what is seen around ``loss_fn``."""


@dataclass(frozen=True)
class Call:
    """One call of a step: the tensors that go in, by name and in order, and how to put them together again."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    values: Sequence[Any]  # of the batch: tensors and all the rest
    structure: Any  # of the batch

    @property
    def batch(self) -> list[Tensor]:
        """The tensors of the batch."""
        return [value for value in self.values if isinstance(value, Tensor)]

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors, as a graph takes them."""
        return [*self.parameters.values(), *self.buffers.values(), *self.batch]

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that get a gradient and curvature."""
        return [leaf for leaf in self.inputs if leaf.requires_grad]


def call_of(model: nn.Module, args: Any, kwargs: Any) -> Call:
    """The call with these arguments; in one sentence why it cannot be compiled otherwise."""
    values, structure = pytree.tree_flatten((args, kwargs))
    call = Call(dict(model.named_parameters()), dict(model.named_buffers()), values, structure)
    _refuse_batch(values)
    if any(map(is_lazy, call.inputs)):
        raise ValueError(_LAZY)
    refuse_views(call.inputs)
    leaves = call.leaves
    if not all(leaf.is_leaf for leaf in leaves):
        raise ValueError(_NO_LEAF)
    if len({*map(id, leaves)}) < len(leaves):
        raise ValueError(_TWICE)
    return call


def _refuse_batch(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter):
                raise TypeError(_SUBCLASS.format(kind=type(value).__name__))
        elif not isinstance(value, LOOKED_INTO) and key_of(value) is None and not _is_frozen(value):
            raise TypeError(_OPAQUE.format(kind=type(value).__name__))


def refuse_views(tensors: Iterable[Tensor]) -> None:
    """ValueError for tensors whose numbers are not those that lie in their memory."""
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise ValueError(_VIEWED.format(kind="sparse or nested tensor"))
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(_VIEWED.format(kind="conjugate or negative view"))


def _is_frozen(value: Any) -> bool:
    """Whether it is compared by what is in it, and cannot be changed, as far as its class tells."""
    return getattr(type(value), "__hash__", None) not in (None, object.__hash__)
