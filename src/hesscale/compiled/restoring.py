"""Whatever a forward pass may leave in Python while it is traced: found before, and made what it was afterwards.

What it leaves would be tensors without values, and counts that the compiled calls do not go on with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from .backend import cache_of_parametrizations
from .call import Call
from .facts import objects_around

_DEEP: Final = 4  # containers in containers
_CLOSED: Final = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType)  # modules are looked at one by one


def open_modules(loss_fn: Callable[..., Any], model: nn.Module, call: Call) -> list[nn.Module]:
    """The model's modules, and those of a teacher or a criterion beside it."""
    found = (model, *call.values, *objects_around(loss_fn))
    return [*dict.fromkeys(module for one in found if isinstance(one, nn.Module) for module in one.modules())]


def open_objects(loss_fn: Callable[..., Any], model: nn.Module, call: Call) -> Iterator[Any]:
    """Whatever a forward pass may set attributes of."""
    yield from open_modules(loss_fn, model, call)
    yield from (one for one in (*call.values, *objects_around(loss_fn)) if not isinstance(one, (Tensor, nn.Module)))


@contextmanager
def left_as_it_was(objects: Iterable[Any]) -> Iterator[None]:
    """Attributes of these objects, and lists, dicts, sets and objects in them, are in the end what they were."""
    before: dict[int, tuple[Any, Any]] = {}
    for one in objects:
        _note(getattr(one, "__dict__", None), before, _DEEP)
    try:
        with _nothing_cached():
            yield
    finally:
        for held, contents in before.values():
            if [*map(id, _all_in(held))] != [*map(id, _all_in(contents))]:
                held.clear()
                held.extend(contents) if isinstance(held, (list, deque)) else held.update(contents)
        torch.clear_autocast_cache()


def _note(held: Any, before: dict[int, tuple[Any, Any]], depth: int) -> None:
    """Keeps a copy of what is in a container, and in containers in it."""
    if id(held) in before or not depth or isinstance(held, _CLOSED):
        return
    if isinstance(held, (dict, list, set, deque)):
        before[id(held)] = held, held.copy()
        for value in _all_in(held):
            _note(value, before, depth - 1)
    elif hasattr(held, "__dict__"):
        _note(vars(held), before, depth - 1)


def _all_in(held: Any) -> list[Any]:
    return [*held, *held.values()] if isinstance(held, dict) else [*held]


@contextmanager
def _nothing_cached() -> Iterator[None]:
    """Within ``parametrize.cached()`` what is computed from weights would outlive the trace."""
    cache = cache_of_parametrizations()
    kept = cache.copy()
    cache.clear()
    try:
        yield
    finally:
        cache.clear()
        cache.update(kept)
