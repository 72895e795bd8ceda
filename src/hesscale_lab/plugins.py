"""Tasks and optimizers from a user's Python file.

The source is part of a run's settings: workers on other machines need no file, and a changed file is another run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from inspect import signature
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from .optimizers import OPTIMIZERS, OptimizerSpec
from .tasks.archives import DataError
from .tasks.table import TASKS
from .tasks.task import Task
from .wording import one_line

_TABLES: Mapping[str, tuple[type, dict[str, Any], frozenset[str]]] = {
    "TASKS": (Task, TASKS, frozenset(TASKS)),
    "OPTIMIZERS": (OptimizerSpec, OPTIMIZERS, frozenset(OPTIMIZERS)),
}
"""The tables that a plugin may define: the class of their rows, the table they extend, and its built-in names."""


class PluginError(ValueError):
    """A plugin cannot be read or used."""


class PluginFailure(RuntimeError):
    """A plugin's own code raised an error, which is the cause of this one."""


@dataclass(frozen=True)
class Plugin:
    """The name and content of a Python file."""

    name: str
    source: str

    @property
    def digest(self) -> str:
        """A fingerprint of the source."""
        return sha256(self.source.encode()).hexdigest()[:16]

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        return f"hesscale_plugin_{self.digest}"


def read_plugin(path: Path) -> Plugin:
    """The file, loaded once to see that it works; PluginError in one sentence if it does not."""
    try:
        plugin = Plugin(path.name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"cannot read the plugin {path}: {getattr(error, 'strerror', None) or error}") from None
    load_plugin(plugin)
    return plugin


def load_plugin(plugin: Plugin | None) -> None:
    """Adds the plugin's rows to the tables; PluginError, and no row added, if one of them is not usable."""
    if plugin is None:
        return
    module = sys.modules.get(plugin.module) or _executed(plugin)
    defined = {table: getattr(module, table, {}) for table in _TABLES}
    if not any(defined.values()):
        raise PluginError(f"the plugin {plugin.name} defines neither TASKS nor OPTIMIZERS")
    for table, rows in defined.items():
        _check(f"the plugin {plugin.name}", table, rows)
    for table, rows in defined.items():
        _TABLES[table][1].update(rows)


@contextmanager
def named_in_errors(plugin: Plugin | None) -> Iterator[None]:
    """Turns an error out of the plugin's code into PluginFailure; other errors stay as they are."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        if plugin is None or all(frame.f_globals.get("__name__") != plugin.module for frame in frames):
            raise
        raise PluginFailure(f"the plugin {plugin.name} failed ({one_line(error)})") from error


def is_built_in(table: str, name: str) -> bool:
    """Whether the row of this name in TASKS or OPTIMIZERS is there without a plugin."""
    return name in _TABLES[table][2]


def _executed(plugin: Plugin) -> ModuleType:
    module = sys.modules[plugin.module] = ModuleType(plugin.module)  # dataclasses and pickle look the module up there
    try:
        exec(compile(plugin.source, plugin.name, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[plugin.module]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise PluginError(f"the plugin {plugin.name} cannot be loaded ({one_line(error)})") from error
    return module


def _check(plugin: str, table: str, rows: Any) -> None:
    kind, _, built_in = _TABLES[table]
    if not isinstance(rows, Mapping) or not all(isinstance(row, kind) for row in rows.values()):
        raise PluginError(f"{table} of {plugin} must be a dict of names and {kind.__name__}s")
    for name, row in rows.items():
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
            raise PluginError(f"{name!r} in {plugin} is no name: take letters, digits, - and _")
        if name in built_in:
            raise PluginError(f"{name!r} in {plugin} is there already: choose another name")
        if isinstance(row, OptimizerSpec):
            try:
                signature(row.make).bind([], lr=0.1, betas=(0.9, 0.999), fused=False, **row.options)
            except TypeError as error:
                raise PluginError(
                    f"{name!r} in {plugin} cannot be made from groups, lr, betas and fused ({error})"
                ) from None
