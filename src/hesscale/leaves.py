"""Where curvature is kept: in ``p.curvature``, for as long as the gradient it belongs to has not been cleared.

A pass adds to what is there, as torch adds to ``p.grad``. Curvature starts afresh once the gradient was set to None or
to zero (though not through ``.data``, which torch does not count), also where a plain backward pass fills it again; not
where the gradient is scaled, moved or replaced. What was written into ``p.curvature`` by hand is left to who wrote it,
until the next pass of ours.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from .graph import running_backward_accumulates, running_node, storage_id, wide
from .traced import is_traced

_LOCK: Final = threading.Lock()  # two threads may run backward on the same parameters


def is_cleared(leaf: Tensor) -> bool:
    """Whether a leaf has no gradient, or one that was set to zero since curvature was last added."""
    grad: Any = leaf.grad
    if grad is None:
        return True
    if getattr(grad, "version_of_curvature", None) == grad._version:  # nobody has written to it
        return False
    held = grad.to_local() if hasattr(grad, "to_local") else grad
    if not bool((held.coalesce().values() if held.is_sparse else held).any()):
        return True
    grad.version_of_curvature = grad._version  # found out once
    return False


def drop_if_cleared(leaf: Any) -> None:
    """Sets ``p.curvature`` to None if the gradient it belongs to has been cleared."""
    if getattr(leaf, "curvature", None) is not None:
        with _LOCK:
            if is_cleared(leaf):
                leaf.curvature = None


@unserializable_hook  # type: ignore[untyped-decorator]
def before_accumulation(_: Tensor) -> None:
    """A hook of leaves, which runs in every backward pass: the last moment to see that a gradient was cleared."""
    node: Any = running_node()
    leaf = getattr(node, "variable", None)
    is_ours = hasattr(getattr(leaf, "curvature", None), "method")
    if is_ours and running_backward_accumulates(node):
        drop_if_cleared(leaf)


def add(leaf: Any, s: Tensor, *, method: str | None = None) -> None:
    """Gives a leaf its curvature, once torch has written its gradient, in addition to what is there.

    ``method`` is noted on it (``curvature.method``), so that who reads it can tell by which pass it was written.
    """
    with _LOCK, torch.no_grad():
        if leaf.is_leaf:
            _watch(leaf)
        old = None if leaf.grad is None else getattr(leaf, "curvature", None)
        if old is not None:
            before = getattr(old, "method", None)
            method = method if before in (None, method) else f"{before} and {method}"
            s = old.to(s).add_(s)  # the model may have moved
        set_curvature(leaf, s, method)


def set_curvature(p: Any, curvature: Tensor, method: str | None) -> None:
    """Makes this the curvature that belongs to the gradient as it is now."""
    p.curvature = curvature
    p.curvature.method = method
    if p.grad is not None:
        p.grad.version_of_curvature = p.grad._version


def _watch(leaf: Tensor) -> None:
    hooks = leaf._backward_hooks
    if hooks is None or before_accumulation not in hooks.values():
        leaf.register_hook(before_accumulation)
    elif not hasattr(leaf, "curvature"):  # torch.utils.swap_tensors leaves hooks without effect, and attributes behind
        leaf._backward_hooks = hooks


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
