"""Numbers while a pass is traced for a compiler: which are known for good, and which will be others in each run.

Names that torch does not document: ``_get_dispatch_mode``, ``_TorchDispatchModeKey``, without which no pass is taken to
be traced, and ``_DisableTorchDispatch``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

_get_mode: Final[Any] = getattr(torch._C, "_get_dispatch_mode", None)
_kinds: Final[Any] = getattr(torch._C, "_TorchDispatchModeKey", None)


def is_traced() -> bool:
    """Whether operations are written down rather than run, for a compiler: tensors may have no values then."""
    if _get_mode is None or _kinds is None:
        return False
    return _get_mode(_kinds.FAKE) is not None or _get_mode(_kinds.PROXY) is not None


def value_of(x: Tensor) -> Any:
    """The number in a tensor of one element; None where it is traced and will be another one in each run."""
    if not is_traced():
        return x.item()
    with untraced():
        return x.item() if type(x) is Tensor else None


def unwrapped(x: Any) -> Any:
    """A Python number that torch keeps as a tensor, while tracing, when only tensors are taken; else ``x`` itself.

    A symbol that torch keeps so, and a tensor that somebody may write to, become part of what is traced.
    """
    if type(x) is not Tensor or x.dim() or not is_traced():
        return x
    if _is_known_number(x):
        with untraced():
            return x.clone()
    return torch.ones((), dtype=x.dtype, device=x.device) * x


_BELOW: Final = {torch.float64: torch.float32, torch.int64: torch.int32, torch.complex128: torch.complex64}
_SYMBOL: Final = 7777777  # what torch writes where a symbolic whole number goes; for other symbols it writes nan


def _is_known_number(x: Tensor) -> bool:
    """Whether it is a number of Python's, which gives way to any tensor's dtype, and no symbol."""
    if x.dtype not in _BELOW:
        return False
    with untraced():
        gives_way = torch.result_type(x, torch.ones((), dtype=_BELOW[x.dtype])) is not x.dtype
        value = x.item()
    return gives_way and value == value and value != _SYMBOL


@contextmanager
def untraced() -> Iterator[None]:
    """Operations on tensors with values are run, and nobody writes them down."""
    with torch._C._DisableTorchDispatch():
        yield
