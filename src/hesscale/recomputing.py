"""Checkpoints (``use_reentrant=False``): recomputed once, and then read as often as rules, columns and torch want to.

Torch drops a tensor that a checkpoint has recomputed as soon as it was read, for a backward pass reads each one once. A
rule reads it before torch does, and some nodes, such as writes into slices, read what nobody else can get at.

Names that torch does not document: ``_current_graph_task_id`` is needed. Without ``checkpoint._Holder`` checkpoints
fail; without ``_get_graph_exec_group`` and ``_set_graph_exec_group`` second derivatives inside them, and further passes
over them, recompute again, which selective checkpoints refuse.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, final

import torch
import torch.utils.checkpoint as checkpoints

_get_group: Final[Any] = getattr(torch._C, "_get_graph_exec_group", None)
_set_group: Final[Any] = getattr(torch._C, "_set_graph_exec_group", None)
_holder: Final[Any] = getattr(checkpoints, "_Holder", None)

_KEEPING: Final[weakref.WeakValueDictionary[Any, object]] = weakref.WeakValueDictionary()
"""Whoever wants that what is recomputed is kept, by what torch's checkpoints keep it by: a pass, or a group of them."""


def running_backward() -> int:
    """An id of the backward pass that is running, unique in this process; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def keep_recomputed(owner: object) -> None:
    """As long as ``owner`` lives, what the running pass recomputes can be read again, until torch frees the graph."""
    _teach_checkpoints()
    group = None if _get_group is None else _get_group()
    _KEEPING.setdefault(running_backward() if group is None else group, owner)


@final
class _Owner:
    """Somebody."""


@contextmanager
def recomputed_once() -> Iterator[None]:
    """All passes and readings in here share what is recomputed; else each has its own, outside of a pass each reading.

    Forward passes do not belong in here: one that runs backward within a checkpoint would have recomputed half of it.
    """
    owner = _Owner()
    with _group(object()):
        keep_recomputed(owner)
        yield


@contextmanager
def same_recomputation() -> Iterator[None]:
    """A nested pass reads what the one that is running has recomputed."""
    if running_backward() < 0:
        yield
    else:
        with _group(running_backward()):
            yield


@contextmanager
def _group(group: object) -> Iterator[None]:
    """Within it checkpoints keep what they recompute by this, unless they keep it by something else already."""
    if _get_group is None or _set_group is None or _get_group() is not None:
        yield
        return
    _set_group(group)
    try:
        yield
    finally:
        _set_group(None)


@final
class _Handles(dict[Any, Any]):
    """Of one tensor of a checkpoint, by pass: torch writes None over the handle of what was read."""

    def __setitem__(self, task: Any, handle: Any) -> None:
        if handle is not None or task not in _KEEPING:
            super().__setitem__(task, handle)


@final
class _OfHolder:
    """``handles`` of what stands for a tensor that is going to be recomputed, also if it was made long before."""

    def __get__(self, holder: Any, kind: type) -> Any:
        if holder is None:
            return self
        found = vars(holder)["handles"]
        if type(found) is dict:
            found = vars(holder)["handles"] = _Handles(found)
        return found

    def __set__(self, holder: Any, handles: Any) -> None:
        vars(holder)["handles"] = handles


@cache
def _teach_checkpoints() -> None:
    """Once, before the first pass: passes that nobody wants anything of are left as they are."""
    if _holder is not None:
        _holder.handles = _OfHolder()


def is_to_be_recomputed(packed: Any) -> bool:
    """Whether what a node has saved is a checkpoint's, in place of the tensor."""
    return _holder is not None and isinstance(packed, _holder)
