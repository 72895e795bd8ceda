"""``optimizer.armed()``: within it torch's own ``backward`` fills curvature, for trainers that leave no line to us.

``Tensor.backward`` calls ``torch.autograd.backward``, which is replaced while any thread is armed. What is armed is
known per thread, so that other threads run what they always ran.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import torch
from torch import Tensor

from ..graph import LEAF, graph_of, running_backward, torch_backward
from .shards import is_sharded

if TYPE_CHECKING:
    from .reading import ReadsCurvature

_TOO_MUCH = (
    "curvature by {name} takes a pass of its own, from one scalar loss to all parameters: within armed() call "
    "loss.backward() without gradient, inputs and create_graph"
)


class Armed(NamedTuple):
    """An optimizer, and what its source is to be told."""

    optimizer: ReadsCurvature
    options: Mapping[str, Any]


@final
class _Local(threading.local):
    stack: tuple[Armed, ...] = ()


_LOCAL: Final = _Local()
_LOCK: Final = threading.Lock()
_count = 0  # of blocks that are armed, in all threads


@contextmanager
def armed(optimizer: ReadsCurvature, options: Mapping[str, Any]) -> Iterator[None]:
    """Arms this thread."""
    before = _LOCAL.stack
    _change_count(1)
    _LOCAL.stack = (*before, Armed(optimizer, options))
    try:
        yield
    finally:
        _LOCAL.stack = before
        _change_count(-1)


@contextmanager
def suspended() -> Iterator[None]:
    """Torch's own ``backward`` in this thread: what a source calls is not to be armed again."""
    before, _LOCAL.stack = _LOCAL.stack, ()
    try:
        yield
    finally:
        _LOCAL.stack = before


def _change_count(by: int) -> None:
    global _count
    with _LOCK:
        _count += by
        if _count == by == 1 and torch.autograd.backward is torch_backward:
            torch.autograd.backward = _backward
        elif not _count and torch.autograd.backward is _backward:  # else somebody has replaced it after us
            torch.autograd.backward = torch_backward


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward``, with curvature for the innermost armed optimizer that needs it."""
    options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
    gradients = grad_tensors if grad_variables is None else grad_variables
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors) if isinstance(tensors, Sequence) else ()
    found = _concerned(roots, inputs)
    with suspended():
        if found is None:
            torch_backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        else:
            _run(found, *_one_loss(roots, gradients), **options)


def _concerned(roots: Sequence[Any], inputs: Any) -> Armed | None:
    """The innermost armed optimizer whose curvature is due and whose parameters a backward from ``roots`` reaches."""
    if not roots or running_backward() >= 0 or not all(isinstance(y, Tensor) and y.requires_grad for y in roots):
        return None
    due: list[Armed] = [entry for entry in reversed(_LOCAL.stack) if entry.optimizer.curvature_due]
    if not due:
        return None
    leaves = _leaves(roots) if inputs is None else {*map(id, (inputs,) if isinstance(inputs, Tensor) else inputs)}
    for entry in due:
        params = [p for group in entry.optimizer.param_groups for p in group["params"]]
        # the leaves of a sharded model are its whole parameters, which the optimizer does not know
        if any(id(p) in leaves or is_sharded(p) for p in params):
            return entry
    return None


def _leaves(roots: Sequence[Tensor]) -> set[int]:
    nodes = [node for y in roots for node in graph_of(y).nodes]
    return {id(node.variable) for node in nodes if node.name() == LEAF}  # type: ignore[attr-defined]


def _one_loss(roots: Sequence[Tensor], gradients: Any) -> tuple[Tensor, Tensor | None]:
    """A tensor, and the gradient to start from: the very ones if there is one root, else their products' sum."""
    seeds = (gradients,) if gradients is None or isinstance(gradients, Tensor) else tuple(gradients)
    if len(roots) == 1:
        return roots[0], seeds[0]
    seeds = seeds if len(seeds) == len(roots) else seeds * len(roots)
    parts = [y if v is None else (y * v).sum() for y, v in zip(roots, seeds, strict=True)]
    return torch.stack([part.reshape(()) for part in parts]).sum(), None


def _run(found: Armed, loss: Tensor, gradient: Tensor | None, **options: Any) -> None:
    source = found.optimizer.source
    assert source is not None  # armed() has seen to it
    found.optimizer.drop_cleared()
    if source.attaches:
        source.attach(loss, **found.options)
        torch_backward(loss, gradient, **options)
        return
    if gradient is not None or options["inputs"] is not None or options["create_graph"]:
        raise RuntimeError(_TOO_MUCH.format(name=source.name))
    params = [p for group in found.optimizer.param_groups for p in group["params"] if p.requires_grad]
    source(loss, params, retain_graph=bool(options["retain_graph"]), **found.options)
