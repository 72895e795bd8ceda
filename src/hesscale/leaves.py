"""Where curvature is kept: in ``p.curvature``, for as long as the gradient it belongs to.

A pass adds to what is there if ``p.grad`` is still the gradient that earlier passes have filled, and starts afresh if
it is another one, or has been set to zero (though not through ``.data``, which torch does not count). Curvature whose
gradient is gone is cleared when the next pass of any model writes its own.
"""

from __future__ import annotations

import threading
import weakref
from sys import getrefcount
from typing import Any, Final, final

import torch
from torch import Tensor

from .graph import storage_id, wide
from .traced import is_traced

_LOCK: Final = threading.Lock()  # two threads may run backward on the same parameters
_ORPHANS: Final[list[tuple[dict[str, Any], weakref.ref[Tensor]]]] = []


@final
class _Mark(weakref.ref[Tensor]):
    """A gradient that some curvature belongs to. It knows the leaf's attributes, not the leaf, which may be swapped."""

    __slots__ = ("attributes", "curvature", "key", "version")
    attributes: dict[str, Any]
    curvature: weakref.ref[Tensor]
    key: int
    version: int


_MARKS: Final[dict[int, _Mark]] = {}


def _become_orphan(mark: Any) -> None:
    key: int = mark.key
    if _MARKS.get(key) is mark:
        del _MARKS[key]
    # if somebody beside the mark and this call holds the attributes, the leaf lives
    if getrefcount(mark.attributes) > 2:
        _ORPHANS.append((mark.attributes, mark.curvature))


def clear_orphans() -> None:
    """Sets ``p.curvature`` to None where the gradient it belongs to is gone."""
    while _ORPHANS:
        attributes, curvature = _ORPHANS.pop()
        if attributes.get("curvature") is curvature() is not None:
            attributes["curvature"] = None


def continues(leaf: Tensor) -> bool:
    """Whether the curvature of a leaf belongs to its gradient as it is now, before torch adds to it."""
    grad = leaf.grad
    mark = None if grad is None else _MARKS.get(id(grad))
    if grad is None or mark is None or mark() is not grad:
        return False
    if grad._version != mark.version and not bool(grad.any()):  # zero_grad(set_to_none=False)
        del _MARKS[mark.key]
        return False
    return True


def add(leaf: Any, s: Tensor, *, to_old: bool, method: str | None = None) -> None:
    """Gives a leaf its curvature, once torch has written its gradient; ``to_old`` is what ``continues`` has said.

    ``method`` is noted on it (``curvature.method``), so that who reads it can tell by which pass it was written.
    """
    with _LOCK, torch.no_grad():
        grad = leaf.grad
        to_old = to_old or (id(grad) in _MARKS and continues(leaf))  # another thread may have been faster
        old = getattr(leaf, "curvature", None) if to_old else None
        if old is not None:
            before = getattr(old, "method", None)
            method = method if before == method else f"{before} and {method}"
            s = old.to(s).add_(s)  # the model may have moved
        leaf.curvature = s
        s.method = method  # type: ignore[attr-defined]
        if grad is not None:
            mark = _Mark(grad, _become_orphan)
            mark.attributes, mark.curvature = leaf.__dict__, weakref.ref(s)
            mark.key, mark.version = id(grad), grad._version
            _MARKS[mark.key] = mark


def owned(s: Tensor | None, like: Tensor, taken: set[int]) -> Tensor:
    """``s`` laid out like ``like`` in memory of its own, which is added to ``taken``; zeros if there is no ``s``."""
    if s is None or s._is_zerotensor():  # torch's zeros without memory
        return torch.zeros_like(like, dtype=wide(like.dtype), requires_grad=False)
    if is_traced():  # sizes may be symbols; whoever runs the graph sees to its memory
        return s
    memory = storage_id(s)
    if s.untyped_storage().nbytes() == s.nbytes and memory not in taken and s.stride() == like.stride():
        taken.add(memory)
        return s
    return torch.empty_like(like, dtype=s.dtype, requires_grad=False).copy_(s)
