"""Scratch memory that is reused between passes: large results of rules go where those of the pass before lay.

A fresh tensor of a megabyte costs more in page faults than the arithmetic on it. A buffer is handed out as a tensor of
its own, and is free again as soon as no other tensor refers to its storage. So ``p.curvature``, or whatever reference a
user keeps, is never overwritten, and nothing has to be released by hand.

A workspace belongs to the storage of a graph's first leaf and to a thread. When that storage is freed, the workspace is
freed by the next pass of the thread. On devices other than the CPU torch's caching allocator does the same job.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import chain
from sys import getrefcount
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..graph import storage_id, storage_users
from . import enabled

LEAST: Final = 1 << 18
"""Bytes from which memory is reused; smaller allocations come from torch without page faults."""

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and dtype."""

_MOST_PASSING: Final = 1 << 22  # bytes, of what lives for one step of a pass
_KEPT: Final = 4  # passes that a buffer may go unused; several models may take turns on shared layers
_PLAIN: Final = (Tensor, nn.Parameter)


@final
class _Buffer:
    """A tensor that only its workspace refers to, and aliases of which are handed out."""

    __slots__ = ("__weakref__", "_address", "_storage", "alone", "last_pass", "whole")

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.whole = torch.empty_strided(size, stride, dtype=dtype)
        self._storage = self.whole.untyped_storage()
        self._address = storage_id(self.whole)
        self.alone = self.users()
        self.last_pass = 0

    def users(self) -> tuple[int, int, int]:
        """References by tensors and by the storage's one Python object, and its address, which changes when shared."""
        storage = self._storage
        assert storage_users is not None  # nothing is reused without it
        return storage_users(self._address), getrefcount(storage), storage.data_ptr()


@final
class _Pool:
    """The buffers of one layout and dtype."""

    __slots__ = ("buffers", "last")

    def __init__(self) -> None:
        self.buffers: list[_Buffer] = []
        self.last = 0  # index of the buffer that was handed out last in this pass

    def take(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> _Buffer:
        """A free buffer: the last one used, which may still be in the cache, or the next; a new one if none is free."""
        last, buffers = self.last, self.buffers
        for place in chain(range(last, len(buffers)), range(last)):
            buffer = buffers[place]
            if buffer.users() == buffer.alone:
                self.last = place
                return buffer
        self.last = len(buffers)
        buffers.append(_Buffer(size, stride, dtype))
        return buffers[-1]


@final
class Workspace:
    """The buffers of one model on one thread."""

    def __init__(self) -> None:
        self._pools: dict[Layout, _Pool] = {}
        self._pass = 0

    def begin_pass(self) -> None:
        """Counts passes, and drops buffers that the last few did not need."""
        self._pass += 1
        for layout, pool in list(self._pools.items()):
            pool.last = 0
            if any(self._pass - buffer.last_pass > _KEPT for buffer in pool.buffers):
                pool.buffers = [buffer for buffer in pool.buffers if self._pass - buffer.last_pass <= _KEPT]
                if not pool.buffers:
                    del self._pools[layout]

    def empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with whatever its memory held before."""
        layout = (size, stride, dtype)
        pool = self._pools.get(layout)
        if pool is None:
            pool = self._pools[layout] = _Pool()
        buffer = pool.take(size, stride, dtype)
        buffer.last_pass = self._pass
        return buffer.whole.detach()


@final
class _Local(threading.local):
    def __init__(self) -> None:
        self.by_memory: dict[int, tuple[StorageWeakRef, Workspace]] = {}
        self.current: Workspace | None = None


_LOCAL: Final = _Local()


def workspace_of(leaf: Tensor) -> Workspace | None:
    """The workspace of this thread that goes with the memory of ``leaf``, for a new pass; None if there is none."""
    if storage_users is None or not enabled() or not _is_plain(leaf):
        return None
    release()
    memory = storage_id(leaf)
    found = _LOCAL.by_memory.get(memory)
    if found is None:
        found = _LOCAL.by_memory[memory] = (StorageWeakRef(leaf.untyped_storage()), Workspace())
    found[1].begin_pass()
    return found[1]


def release() -> None:
    """Gives back the memory of models that are gone; every pass begins with it."""
    # a weak reference to a tensor itself would stand in the way of torch.utils.swap_tensors
    for key, (memory, _) in list(_LOCAL.by_memory.items()):
        if memory.expired():
            del _LOCAL.by_memory[key]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is torch.strided


def use_workspace(workspace: Workspace | None) -> Workspace | None:
    """Makes ``workspace`` the one that the functions below allocate from, and returns the one before."""
    before, _LOCAL.current = _LOCAL.current, workspace
    return before


def _current(like: Tensor) -> Workspace | None:
    """The workspace for a result made from ``like``; None where torch should allocate it itself."""
    if torch.is_grad_enabled() or not _is_plain(like):
        return None
    return _LOCAL.current


def lending(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``allocate(size, stride, dtype)``, from the workspace in use where there is one and the memory is large."""

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        workspace = _LOCAL.current
        if workspace is None or math.prod(size) * dtype.itemsize < LEAST:
            return allocate(size, stride, dtype)
        return workspace.empty(size, stride, dtype)

    return empty


def scratch(x: Tensor) -> Tensor | None:
    """Memory for what stands in for x in the next step of a pass; None where torch should allocate it itself.

    Not where x is large: the images of a convolutional network would keep as much memory again between passes.
    """
    return _scratch_like(x) if type(x) in _PLAIN and LEAST <= x.nbytes <= _MOST_PASSING else None


def squared(x: Tensor) -> Tensor:
    """x², laid out as x is."""
    return torch.mul(x, x, out=_scratch_like(x) if type(x) in _PLAIN and x.nbytes >= LEAST else None)


def _scratch_like(x: Tensor) -> Tensor | None:
    workspace = _current(x)
    return None if workspace is None or not _is_dense(x) else workspace.empty(x.shape, x.stride(), x.dtype)


def _is_dense(x: Tensor) -> bool:
    """Whether memory and elements of x are the same thing: its rows, its columns or its channels come one by one."""
    return (
        x.is_contiguous()
        or (x.dim() == 2 and x.stride() == (1, x.shape[0]))
        or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """ab for two matrices."""
    rows, columns = a.shape[0], b.shape[1]
    workspace = _current(a) if type(a) in _PLAIN and rows * columns * a.itemsize >= LEAST else None
    return torch.mm(a, b, out=None if workspace is None else workspace.empty((rows, columns), (columns, 1), a.dtype))
