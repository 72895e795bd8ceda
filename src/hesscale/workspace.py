"""Memory that passes use again and again: large results of rules go where those of the pass before lay.

A fresh tensor of a megabyte costs more in page faults than the arithmetic on it. A buffer is lent as a tensor of its
own; it is free again as soon as no such tensor lives any more. So ``p.curvature``, or whatever reference a user keeps,
is never overwritten, and nothing has to be given back by hand.

A workspace belongs to the first leaf of a graph and to a thread, and is gone with either. On other devices than the
CPU torch's own allocator does the same, so nothing is lent there.
"""

from __future__ import annotations

import threading
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

LEAST: Final = 1 << 16
"""Bytes from which memory is lent; less comes from torch without page faults."""

_KEPT: Final = 4  # passes that a buffer may go unused; several models may take turns on shared layers
_PLAIN: Final = (Tensor, nn.Parameter)


@final
class _Buffer:
    """A tensor that nobody but its workspace sees, and aliases of which are lent."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype) -> None:
        self._whole = torch.empty(size, dtype=dtype)
        self._storage = self._whole.untyped_storage()
        self._alone = self._users()
        self.last_pass = 0

    def _users(self) -> int:
        users: int = torch._C._storage_Use_Count(self._storage._cdata)
        return users

    @property
    def is_free(self) -> bool:
        return self._users() == self._alone

    def lend(self) -> Tensor:
        return self._whole.detach()


@final
class Workspace:
    """The buffers of one model on one thread."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype], list[_Buffer]] = {}
        self._pass = 0

    def begin_pass(self) -> None:
        """Counts passes, and drops buffers that the last few did not need."""
        self._pass += 1
        for key, buffers in list(self._buffers.items()):
            if any(self._pass - buffer.last_pass > _KEPT for buffer in buffers):
                self._buffers[key] = [buffer for buffer in buffers if self._pass - buffer.last_pass <= _KEPT]
                if not self._buffers[key]:
                    del self._buffers[key]

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with whatever its memory held before."""
        buffers = self._buffers.setdefault((size, dtype), [])
        buffer = next((buffer for buffer in buffers if buffer.is_free), None)
        if buffer is None:
            buffer = _Buffer(size, dtype)
            buffers.append(buffer)
        buffer.last_pass = self._pass
        return buffer.lend()


@final
class _Local(threading.local):
    def __init__(self) -> None:
        self.by_leaf = WeakIdKeyDictionary()
        self.current: Workspace | None = None


_LOCAL: Final = _Local()


def workspace_of(leaf: Tensor) -> Workspace:
    """The workspace of this thread that lives as long as ``leaf``."""
    found: Workspace | None = _LOCAL.by_leaf.get(leaf)
    if found is None:
        found = _LOCAL.by_leaf[leaf] = Workspace()
    return found


@final
class lending:
    """A context in which the functions below lend from ``workspace``."""

    __slots__ = ("_before", "_workspace")

    def __init__(self, workspace: Workspace | None) -> None:
        self._workspace = workspace

    def __enter__(self) -> None:
        self._before, _LOCAL.current = _LOCAL.current, self._workspace

    def __exit__(self, *failure: object) -> None:
        _LOCAL.current = self._before


def empty(size: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Memory for a result of this size, of the dtype of ``like``; None where torch should allocate it itself."""
    workspace = _LOCAL.current
    if workspace is None or type(like) not in _PLAIN or like.device.type != "cpu" or torch.is_grad_enabled():
        return None
    numel = 1
    for length in size:
        numel *= length
    return workspace.empty(size, like.dtype) if numel * like.element_size() >= LEAST else None


def squared(x: Tensor) -> Tensor:
    """x², laid out as x is."""
    if x.is_contiguous():
        return torch.mul(x, x, out=empty(tuple(x.shape), x))
    if x.dim() == 2 and x.mT.is_contiguous():
        return squared(x.mT).mT
    return x * x


def product(a: Tensor, b: Tensor) -> Tensor:
    """ab for two matrices."""
    return torch.mm(a, b, out=empty((a.shape[0], b.shape[1]), a))
