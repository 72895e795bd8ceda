"""Which names code reads and writes, and whose code it is: that of what is installed is taken to stay as it is."""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

_LIBRARIES: Final = frozenset((*sys.stdlib_module_names, "torch", "numpy", "hesscale"))
_OPEN: Final = frozenset(("types", "argparse", "collections"))  # SimpleNamespace, Namespace, UserDict
_INSTALLED: Final = ("site-packages", "dist-packages")


class Reads(NamedTuple):
    """What code asks for by name."""

    variables: tuple[str, ...]  # global ones
    attributes: frozenset[str]
    written: frozenset[str]  # variables and attributes


@lru_cache(maxsize=4096)
def reads_of(code: CodeType) -> Reads:
    """What a function reads, and functions, comprehensions and classes written in it."""
    variables: dict[str, None] = {}
    attributes: set[str] = set()
    written: set[str] = set()
    for one in dis.get_instructions(code):
        operation, name = one.opname, one.argval
        if operation.startswith("STORE_") and operation != "STORE_FAST" and isinstance(name, str):
            written.add(name)
        if "GLOBAL" in operation or operation == "LOAD_NAME":
            variables[name] = None
        elif operation.startswith("LOAD") and ("ATTR" in operation or "METHOD" in operation):
            attributes.add(name)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = reads_of(inner)
            variables.update(dict.fromkeys(found.variables))
            attributes |= found.attributes
            written |= found.written
        elif isinstance(inner, str) and "getattr" in variables:
            attributes.add(inner)
    return Reads(tuple(variables), frozenset(attributes), frozenset(written))


@lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether what is defined in the module of this name is not looked into: classes of torch, say."""
    return module.partition(".")[0] in _LIBRARIES and module not in _OPEN


def has_open_code(function: FunctionType) -> bool:
    """Whether a function is somebody's own, and none of an installed package."""
    return _is_own(str(function.__globals__.get("__name__")), function.__code__.co_filename)


def has_open_names(module: ModuleType) -> bool:
    """The same of a module of Python, such as a ``config.py``."""
    return _is_own(module.__name__, getattr(module, "__file__", None) or "")


@lru_cache(maxsize=4096)
def _is_own(module: str, file: str) -> bool:
    return module.partition(".")[0] not in _LIBRARIES and not any(part in file for part in _INSTALLED)


def written_in_python(function: Any) -> FunctionType | None:
    """The function below decorators, if there is one."""
    while "__wrapped__" in getattr(function, "__dict__", ()):
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None
