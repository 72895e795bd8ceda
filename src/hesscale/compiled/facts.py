"""What Python may decide by while a pass is traced, as far as it can be seen cheaply before every call.

A graph is what Python did while it was traced. Numbers, names, functions and tensors that lie open, in modules and
around ``loss_fn``, are therefore looked at before every call: one that changed means another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any, Final

import torch
from torch import Tensor, nn

Fact = tuple[str, str, Any]
"""Where, what, and its value."""

_PLAIN: Final = frozenset(
    (bool, int, float, str, NoneType, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, MethodType)
)
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def facts_of_module(name: str, module: nn.Module) -> Iterator[Fact]:
    """Its class, its hooks, and its attributes but for parameters, buffers and ``training``, which are inputs."""
    yield name, "class", type(module)
    for key, value in vars(module).items():
        if key in _HOOKS:
            if value:
                yield name, key, tuple(value)
        elif key != "training":
            yield from _seen(name, key, value)


def facts_around(function: Callable[..., Any]) -> Iterator[Fact]:
    """What a function reads without being given it: its closure, and globals by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    if code is None:
        return
    for key, cell in zip(code.co_freevars, cells, strict=True):
        yield from _seen("", key, _content(cell))
    known = function.__globals__
    for key in code.co_names:
        if key in known:
            yield from _seen("", key, known[key])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _seen(where: str, key: str, value: Any) -> Iterator[Fact]:
    """What can be compared without asking a tensor for its values."""
    kind = type(value)
    if kind in _PLAIN or (kind is tuple and all(type(one) in _PLAIN for one in value)):
        yield where, key, value
    elif isinstance(value, Tensor):
        yield where, key, id(value)  # the graph holds it, so no other one gets its number
