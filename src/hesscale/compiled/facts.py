"""What Python may decide by while a pass is traced, as far as it can be seen cheaply before every call.

A graph is what Python did while it was traced. Numbers, names, functions, tensors and modules that lie open, in the
model and around ``loss_fn``, are therefore looked at before every call: one that changed means another graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, NoneType
from typing import Any, Final, final

import torch
from torch import Tensor, nn

Fact = tuple[str, str, Any]
"""Where, what, and its value."""

_PLAIN: Final = frozenset(
    (bool, int, float, str, NoneType, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, MethodType)
)
_KINDS: Final = (Number, str, bytes, Enum, range, type, torch.layout, torch.memory_format, torch.Generator)
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OWNER: Final = ("", "self")
_UNSEEN: Final = frozenset((dict, OrderedDict, list, set))  # may change inside


@final
class Same:
    """A tensor, equal to itself alone; it lives as long as this does, so no other one takes its place."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __repr__(self) -> str:
        return f"a tensor {tuple(self.tensor.shape)}"


def wiring(modules: Iterable[nn.Module]) -> Iterator[tuple[str, int]]:
    """Which modules, parameters and buffers are one and the same, under all names that modules have for them."""
    places: dict[int, int] = {}
    for module in modules:
        for held in (module._modules, module._parameters, module._buffers):
            for key, one in held.items():
                yield key, places.setdefault(id(one), len(places))


def facts_of_module(name: str, module: nn.Module) -> Iterator[Fact]:
    """Its class, its hooks, and its attributes but for parameters, buffers and ``training``, which are inputs."""
    yield name, "class", (type(module), type(module).forward)
    for key, value in vars(module).items():
        if key in _HOOKS:
            if value:
                yield name, key, tuple(value)
        elif key != "training":
            yield from _seen(name, key, value)


def facts_around(function: Callable[..., Any], model: nn.Module) -> Iterator[Fact]:
    """What a function reads without being given it."""
    for where, key, value in _around(function):
        yield from _seen(where, key, value, model)


def objects_around(function: Callable[..., Any]) -> Iterator[Any]:
    """Modules among what it reads, and the object that it belongs to: what it may set attributes of."""
    for where, key, value in _around(function):
        if isinstance(value, nn.Module) or (where, key) == _OWNER:
            yield value


def parameters_as_keys(function: Callable[..., Any], model: nn.Module) -> bool:
    """Whether a set or a dict that a function or the model reads is asked by parameters of the model."""
    known = {*map(id, model.parameters())}
    values = [value for _, _, value in _around(function)]
    values += [value for module in model.modules() for value in vars(module).values()]
    kinds = (set, frozenset, Mapping)
    return any(id(key) in known for value in values if isinstance(value, kinds) for key in value)


def _around(function: Callable[..., Any]) -> Iterator[Fact]:
    """Its closure, defaults, globals by name, what ``partial`` gives it, and the object that it belongs to."""
    if isinstance(function, partial):
        for key, value in (*enumerate(function.args), *function.keywords.items()):
            yield "partial", str(key), value
        yield from _around(function.func)
        return
    owner, inner = _owner_and_code(function)
    yield *_OWNER, owner
    yield from (("self", key, value) for key, value in getattr(owner, "__dict__", {}).items())
    cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    yield from (("", key, _content(cell)) for key, cell in cells)
    for key, value in (*enumerate(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).items()):
        yield "default", str(key), value
    known = inner.__globals__
    yield from (("", key, known[key]) for key in _names(inner.__code__) if key in known)


@lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[str, ...]:
    """What a function reads by name, and functions, comprehensions and classes written in it."""
    inner = (name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _owner_and_code(function: Callable[..., Any]) -> tuple[Any, Any]:
    """The object whose attributes a function may read, if any, and the function as it was written."""
    if isinstance(function, FunctionType):
        return None, function
    if isinstance(function, MethodType):
        return function.__self__, _in_python(function.__func__)
    return function, _in_python(getattr(type(function), "forward", type(function).__call__))


def _in_python(function: Any) -> Any:
    return function if isinstance(function, FunctionType) else _nothing


def _nothing() -> None:
    """Reads nothing: what is known of a function that was not written in Python."""


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _seen(where: str, key: str, value: Any, model: nn.Module | None = None) -> Iterator[Fact]:
    """What can be compared without asking a tensor for its values; of a module beside the model, all that is in it."""
    kind = type(value)
    if kind in _PLAIN:  # most are, or may change unseen: these two come first
        yield where, key, (kind, repr(value) if kind is float else value)
    elif kind not in _UNSEEN:
        if isinstance(value, nn.Module) and model is not None and value is not model:
            yield from facts_of_foreign(f"{where}.{key}", value)
        found = key_of(value)
        if found is not None:
            yield where, key, found


def facts_of_foreign(where: str, root: nn.Module) -> Iterator[Fact]:
    """Of a teacher or a criterion its tensors too, which are constants of a graph."""
    yield where, "wiring", (*wiring(root.modules()),)
    for name, module in root.named_modules(prefix=where):
        yield name, "training", module.training
        yield from facts_of_module(name, module)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield name, key, key_of(tensor)


def key_of(value: Any) -> Any:
    """Something that is equal as long as the value is, and can be a key; None for what may change unseen."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value) if kind is float else value  # 0.0 and -0.0 are equal, and nan is not
    if kind in _UNSEEN:
        return None
    if isinstance(value, Tensor):
        return Same(value), *looks_of(value)
    if isinstance(value, tuple):
        return _all(kind, value)
    if isinstance(value, slice):
        return _all(kind, (value.start, value.stop, value.step))
    if isinstance(value, partial):
        return _all(kind, (value.func, *value.args, *value.keywords, *value.keywords.values()))
    return (kind, value) if isinstance(value, _KINDS) else None


def looks_of(tensor: Tensor) -> tuple[Any, ...]:
    """What a graph knows of a tensor without its values."""
    stride = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return tensor.shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, *attributes_of(tensor)


def attributes_of(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    """What somebody has noted on a tensor, such as ``p.decay = False``."""
    own = tensor.__dict__
    return ((key, key_of(own[key])) for key in own if key != "curvature") if own else iter(())


def _all(kind: type, values: tuple[Any, ...]) -> Any:
    keys = tuple(map(key_of, values))
    return None if any(key is None for key in keys) else (kind, keys)
