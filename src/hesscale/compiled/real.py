"""Tensors with values, met while tracing: those of a closure, of a plain attribute, of a module outside the model.

They are constants of the graph by identity: what is written to them later is seen. So while tracing their values must
not be asked for, which would make Python numbers of them for good, and what is written to them must not stay, since
the compiled call writes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..traced import untraced
from .backend import has_values

_READS: Final = frozenset(("numpy", "tolist", "__array__"))  # which no dispatcher sees
_ASKS: Final = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


class ValueOfConstantError(RuntimeError):
    """The value of such a tensor was asked for."""


@contextmanager
def left_alone() -> Iterator[AbstractContextManager[Any]]:
    """Real tensors are in the end what they were; what was computed within the inner context reads no values of them.

    The end is that of the whole trace: gradients read what the forward pass has saved.
    """
    writes = _Writes()
    try:
        yield _guarded(writes)
    finally:
        writes.undo()


@contextmanager
def _guarded(writes: _Writes) -> Iterator[None]:
    with _Reads(), writes:
        yield


@final
class _Reads(TorchFunctionMode):
    """Refuses what makes arrays and lists of real tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in _READS and args and has_values(args[0]):
            raise ValueOfConstantError
        return function(*args, **(kwargs or {}))


@final
class _Writes(TorchDispatchMode):
    """Keeps a copy of every real tensor before an operation writes to it, and refuses to tell values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _ASKS and any(map(has_values, args)):
            raise ValueOfConstantError
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
