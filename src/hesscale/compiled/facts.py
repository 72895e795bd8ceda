"""What Python may decide by while a pass is traced: whatever the code of ``loss_fn`` and of the model can name.

A graph is what Python did while it was traced. So before every call all that its code reads is looked at, and what
changed means another graph. From ``loss_fn``, and from ``forward`` of every module, code is followed by the names in
it: to variables of closures, to globals, to attributes of objects and classes, and to functions and methods, whose code
is followed in turn. What no code names is not looked at: a trainer may count its steps.
"""

from __future__ import annotations

import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from numbers import Number
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from .names import has_open_code, has_open_names, is_library, reads_of, written_in_python

Fact = tuple[Any, ...]
"""What it is called, and what it is."""

_PLAIN: Final = frozenset((bool, int, float, str, NoneType, torch.dtype, torch.device, BuiltinFunctionType))
_KINDS: Final = (Number, str, bytes, Enum, range, torch.layout, torch.memory_format, torch.Generator)
_HELD: Final = frozenset(("_modules", "_parameters", "_buffers"))
_HOOKS: Final = frozenset(("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"))
_UNSEEN: Final = frozenset((dict, OrderedDict, list, set, MappingProxyType))  # may change inside
_WHOLE: Final = (tuple, FunctionType, MethodType, partial)  # in a module, named or not
_ROOM: Final = 4096  # entries of large containers that are looked at in one call
_SMALL: Final = 64  # entries of containers that always are
_DEEP: Final = 32  # steps from a function or an object to the next


@final
class Same:
    """An object, equal to itself alone. It is not kept alive, if that can be: a dead one is equal to no other."""

    __slots__ = ("_get", "_id")

    def __init__(self, one: Any) -> None:
        self._id = id(one)
        self._get: Callable[[], Any]
        try:
            self._get = weakref.ref(one)
        except TypeError:
            self._get = lambda: one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._id == other._id and self._get() is other._get() is not None

    def __hash__(self) -> int:
        return self._id

    def __repr__(self) -> str:
        one = self._get()
        return f"a tensor {tuple(one.shape)}" if isinstance(one, Tensor) else f"a certain {type(one).__name__}"


def facts_of(model: nn.Module, around: Iterable[tuple[str, Any]], names: set[str]) -> Facts:
    """Of the model, and of functions and values by name. ``names`` get those of attributes that any code reads."""
    values = [*around]
    while True:
        known = len(names)
        facts = Facts(names)
        facts.see_model(model)
        facts.see_around(values)
        if len(names) == known:  # else code was met that reads more of what was met before it
            return facts


@final
class Facts:
    """One walk. ``met`` is whatever was looked into: objects, containers, modules, functions and classes.

    ``written`` are names of variables and attributes that code assigns to.
    """

    def __init__(self, names: set[str]) -> None:
        names.add("forward")
        self.names = names
        self.met: dict[int, Any] = {}
        self.written: set[str] = set()
        self.model: tuple[Fact, ...] = ()
        self.around: tuple[Fact, ...] = ()
        self._found: list[Fact] = []
        self._classes: set[type] = set()
        self._places: dict[int, int] = {}  # which things are one and the same
        self._room, self._depth = _ROOM, 0

    def see_model(self, model: nn.Module) -> None:
        """Classes, hooks, attributes and wiring of its modules; its tensors are inputs of a graph, and no facts."""
        modules = [*model.modules()]
        self.met.update((id(module), module) for module in modules)
        for module in modules:
            self._module(module)
        self.model, self._found = tuple(self._found), []

    def see_around(self, values: Iterable[tuple[str, Any]]) -> None:
        """What functions read without being given it, and whatever else is not the model's."""
        for key, value in values:
            self._see(key, value)
        self.around, self._found = tuple(self._found), []

    def _see(self, key: Any, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._found.append((key, repr(value) if kind is float else value, kind))
            return
        found = key_of(value)
        if found is not None:
            self._found.append((key, found))
            return
        look = self._way_into(value, kind)
        if look is None or self._depth > _DEEP:
            self._found.append((key, Same(value)))
        elif id(value) in self.met:
            self._found.append((key, self._place(value)))
        else:
            self.met[id(value)] = value
            self._depth += 1
            look(key, value)
            self._depth -= 1

    def _way_into(self, value: Any, kind: type) -> Callable[[Any, Any], None] | None:
        """How such a value is looked into; None where it is not."""
        for one, look in self._WAYS.items():
            if isinstance(value, one):
                return partial(look, self)
        if "__wrapped__" in getattr(value, "__dict__", ()):
            return self._object
        return None if is_library(kind.__module__) else self._object

    def _place(self, one: Any) -> int:
        return self._places.setdefault(id(one), len(self._places))

    def _module(self, module: nn.Module) -> None:
        kind, names, found = type(module), self.names, self._found
        found.append(("forward", getattr(kind, "forward", None)))  # that of a scripted module cannot be had
        self._class("class", kind)
        for key, value in vars(module).items():
            if type(value) in _PLAIN:
                found.append((key, repr(value) if type(value) is float else value, type(value)))
            elif key in _HOOKS:
                if value:
                    self._see(key, value)
            elif (key in names and key not in _HELD) or isinstance(value, _WHOLE):
                self._see(key, value)
            elif type(value) not in _UNSEEN:
                seen = key_of(value)
                if seen is not None:
                    found.append((key, seen))
        for held in (module._modules, module._parameters, module._buffers):
            for key, one in held.items():
                found.append((key, self._place(one)))

    def _foreign(self, key: Any, root: nn.Module) -> None:
        """A teacher or a criterion: its tensors too, which are constants of a graph."""
        modules = [module for module in root.modules() if module is root or id(module) not in self.met]
        self.met.update((id(module), module) for module in modules)
        self._found.append((key, self._place(root)))
        for module in modules:
            self._module(module)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                self._see(name, tensor)

    def _function(self, key: Any, function: FunctionType) -> None:
        """Its closure, globals, defaults and attributes; of one that is installed, only functions that it wraps."""
        self._found.append((key, Same(function)))
        code, own, is_open = function.__code__, vars(function), has_open_code(function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = content(cell)
            if is_open or callable(value):
                self._see(name, value)
        if "__wrapped__" in own:
            self._see("__wrapped__", own["__wrapped__"])
        if not is_open:
            return
        reads = reads_of(code)
        self.names |= reads.attributes
        self.written |= reads.written
        for value in function.__defaults__ or ():
            self._see("default", value)
        for name, value in (function.__kwdefaults__ or {}).items():
            self._see(name, value)
        self._named(own)
        known = function.__globals__
        for name in reads.variables:
            if name in known:
                self._see(name, known[name])

    def _method(self, key: Any, method: MethodType) -> None:
        self._see(key, method.__func__)
        self._see("self", method.__self__)

    def _partial(self, key: Any, function: partial[Any]) -> None:
        self._entries(key, (function.func, *function.args))
        self._entries("keywords", function.keywords)

    def _class(self, key: Any, kind: type) -> None:
        """What is named of it and its bases, and its special methods, which code calls without naming them."""
        self._found.append((key, kind))
        if kind in self._classes or is_library(kind.__module__):
            return
        self._classes.add(kind)
        self.met[id(kind)] = kind
        for one in kind.__mro__:
            if is_library(one.__module__):
                continue
            for name, value in [*vars(one).items()]:
                is_special = name[:2] == "__" and isinstance(value, FunctionType) and name not in vars(object)
                if name in self.names or is_special:
                    self._see(name, value)
        forward = written_in_python(getattr(kind, "forward", None)) if issubclass(kind, nn.Module) else None
        if forward is not None:  # of a model that is installed, its code is not followed, but it reads model.config
            self.names |= reads_of(forward.__code__).attributes

    def _descriptor(self, key: Any, value: Any) -> None:
        for name in ("fget", "__func__", "func"):
            self._see(key, getattr(value, name, None))

    def _namespace(self, key: Any, module: ModuleType) -> None:
        self._found.append((key, Same(module)))
        if has_open_names(module):
            self._named(vars(module))

    def _object(self, key: Any, value: Any) -> None:
        self._found.append((key, Same(value)))
        self._attributes(value)

    def _attributes(self, value: Any) -> None:
        self._class("class", type(value))
        own: dict[str, Any] = getattr(value, "__dict__", {})
        self._named(own)
        if "__wrapped__" in own:
            self._see("__wrapped__", own["__wrapped__"])
        for name in slots_of(value):
            if name in self.names and hasattr(value, name):
                self._see(name, getattr(value, name))

    def _named(self, own: Mapping[str, Any]) -> None:
        for name, value in [*own.items()]:
            if name in self.names:
                self._see(name, value)

    def _container(self, key: Any, value: Any) -> None:
        self._entries(key, value)
        if not is_library(type(value).__module__):
            self._attributes(value)

    def _entries(self, key: Any, value: Any) -> None:
        if isinstance(value, (UserDict, UserList)):
            value = value.data
        elif isinstance(value, ChainMap):
            value = value.maps
        if len(value) > max(self._room, _SMALL):
            self._found.append((key, Same(value), len(value)))
            return
        self._room -= len(value) if len(value) > _SMALL else 0  # so that no list hides a config behind it
        if isinstance(value, (set, frozenset)):
            self._found.append((key, type(value), frozenset(key_of(one) or Same(one) for one in value)))
            return
        self._found.append((key, type(value), len(value)))
        for name, one in [*value.items()] if isinstance(value, Mapping) else enumerate([*value]):
            self._see(name if type(name) in _PLAIN else key_of(name) or Same(name), one)

    _WAYS: Final[Mapping[Any, Callable[..., None]]] = {
        nn.Module: _foreign,
        FunctionType: _function,
        MethodType: _method,
        (dict, list, tuple, set, frozenset, deque, UserDict, UserList, ChainMap, MappingProxyType): _container,
        partial: _partial,
        type: _class,
        ModuleType: _namespace,
        (property, staticmethod, classmethod, cached_property): _descriptor,
        weakref.ref: lambda self, key, value: self._see(key, value()),
    }


def content(cell: Any) -> Any:
    """What is in a variable of a closure; None if nothing is yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def slots_of(one: Any) -> list[str]:
    """The names of attributes that an object has by ``__slots__``."""
    kinds = [kind for kind in type(one).__mro__ if "__slots__" in vars(kind)]
    return [name for kind in kinds for name, value in vars(kind).items() if isinstance(value, MemberDescriptorType)]


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
    if isinstance(value, _KINDS):
        return kind, value
    return (kind, value) if is_library(kind.__module__) and _is_a_value(value) else None


def _is_a_value(value: Any) -> bool:
    """Whether it is compared by what is in it, and cannot be changed, as far as its class tells."""
    way: Any = type(value).__hash__
    is_hashed = way is not None and way is not object.__hash__
    return is_hashed and not isinstance(value, (type, MethodType, weakref.ref, frozenset))


def _all(kind: type, values: Sequence[Any]) -> Any:
    keys = tuple(map(key_of, values))
    return None if any(key is None for key in keys) else (kind, keys)


def looks_of(tensor: Tensor) -> tuple[Any, ...]:
    """What a graph knows of a tensor without its values."""
    stride = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return tensor.shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, *attributes_of(tensor)


def attributes_of(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    """What somebody has noted on a tensor, such as ``p.decay = False``."""
    own = tensor.__dict__
    return ((key, key_of(own[key])) for key in own if key != "curvature") if own else iter(())
