"""Whatever a forward pass may leave in Python while it is traced: found before, and made what it was afterwards.

What it leaves would be tensors without values, and counts that the compiled calls do not go on with.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from .backend import cache_of_parametrizations
from .facts import Facts, content, slots_of
from .names import has_open_code, has_open_names, is_library

_DEEP: Final = 4  # containers in containers
_CLOSED: Final = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType)  # what of them is met comes one by one


@contextmanager
def left_as_it_was(facts: Facts) -> Iterator[None]:
    """Attributes of all that was met, and lists, dicts, sets and objects in them, are in the end what they were."""
    before: dict[int, tuple[Any, Any]] = {}
    variables: list[_Variable] = []
    for one in facts.met.values():
        _note(one, before, _DEEP)
        if isinstance(one, (nn.Module, FunctionType)):
            _note(vars(one), before, _DEEP)
        variables += _variables(one, facts.written)
    try:
        with _nothing_cached():
            yield
    finally:
        for held, contents in before.values():
            if [*map(id, _all_in(held))] != [*map(id, _all_in(contents))]:
                _refill(held, contents)
        for read, write, value in variables:
            if read() is not value:
                write(value)
        torch.clear_autocast_cache()


_Variable = tuple[Callable[[], Any], Callable[[Any], Any], Any]
"""How it is read, how it is written, and what it is."""


def _variables(one: Any, written: set[str]) -> Iterator[_Variable]:
    """Of a function the written ones of its closure and its globals; attributes that lie in no dict of an object."""
    if isinstance(one, FunctionType):
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            if name in written:
                yield partial(content, cell), partial(setattr, cell, "cell_contents"), content(cell)
        known = one.__globals__ if has_open_code(one) else {}
    elif isinstance(one, ModuleType):
        known = vars(one) if has_open_names(one) else {}
    else:
        known = {}
    for name in written & known.keys():
        yield partial(known.get, name), partial(known.__setitem__, name), known[name]
    if isinstance(one, type):
        for name in written.intersection(vars(one)):
            yield partial(vars(one).get, name), partial(setattr, one, name), vars(one)[name]
    elif not isinstance(one, _CLOSED):
        for name in written.intersection(slots_of(one)):
            if hasattr(one, name):
                yield partial(getattr, one, name, None), partial(setattr, one, name), getattr(one, name)


def _note(held: Any, before: dict[int, tuple[Any, Any]], depth: int) -> None:
    """Keeps a copy of what is in a container, and in containers in it."""
    if id(held) in before or not depth or isinstance(held, _CLOSED):
        return
    if isinstance(held, (dict, list, set, deque)):
        before[id(held)] = held, _kind(held)(held)
        for value in _all_in(held):
            _note(value, before, depth - 1)
    elif hasattr(held, "__dict__") and not is_library(type(held).__module__):
        _note(vars(held), before, depth - 1)


def _kind(held: Any) -> Any:
    """The container that its class is made of: it may have a constructor and an ``update`` of its own."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(held, kind))


def _refill(held: Any, contents: Any) -> None:
    kind = _kind(held)
    kind.clear(held)
    (kind.extend if kind in (list, deque) else kind.update)(held, contents)


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
