"""Tasks and optimizers of a user's own, from a Python file.

Its source is part of a run's settings and travels with them: workers need no file, a run that is taken up again is the
same run, and what it was made of stays on record.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from inspect import signature
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from .optimizers import OPTIMIZERS, Row
from .tasks.archives import DataError
from .tasks.table import TASKS
from .tasks.task import Task

_KINDS: tuple[tuple[str, type, MutableMapping[str, Any]], ...] = (
    ("TASKS", Task, TASKS),
    ("OPTIMIZERS", Row, OPTIMIZERS),
)
"""What a plugin may define: a table of this name, its rows' class, and the table they are added to."""

_ADDED: set[tuple[str, str]] = set()
"""Tables and names that plugins have added in this process; a later plugin may put other rows there."""


class PluginError(ValueError):
    """A plugin cannot be read, or is none."""


class PluginFailure(RuntimeError):
    """An error out of a plugin's own code, which is its cause."""


@dataclass(frozen=True)
class Plugin:
    """A Python file by value."""

    name: str
    source: str

    @property
    def digest(self) -> str:
        """Another source has another one."""
        return sha256(self.source.encode()).hexdigest()[:16]

    @property
    def module(self) -> str:
        """The name under which its module is imported: another source is another module."""
        return f"hesscale_plugin_{self.digest}"


def read_plugin(path: Path) -> Plugin:
    """The file, loaded once to see that it can be; PluginError in one sentence if not."""
    try:
        plugin = Plugin(path.name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"cannot read the plugin {path}: {getattr(error, 'strerror', None) or error}") from None
    load_plugin(plugin)
    return plugin


def load_plugin(plugin: Plugin | None) -> None:
    """Adds what the plugin defines to the tables; PluginError if that does not go."""
    if plugin is None:
        return
    module = sys.modules.get(plugin.module) or _executed(plugin)
    found = {table: _rows(plugin, table, getattr(module, table, {})) for table, _, _ in _KINDS}
    if not any(found.values()):
        raise PluginError(f"the plugin {plugin.name} defines neither TASKS nor OPTIMIZERS")
    for table, _, rows in _KINDS:
        rows.update(found[table])
        _ADDED.update((table, name) for name in found[table])


@contextmanager
def named_in_errors(plugin: Plugin | None) -> Iterator[None]:
    """Within it an error that comes out of the plugin's code is a PluginFailure; what the lab itself says stays."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        if plugin is None or all(frame.f_globals.get("__name__") != plugin.module for frame in frames):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginFailure(f"the plugin {plugin.name} failed ({reason})") from error


def is_built_in(table: str, name: str) -> bool:
    """Whether the row of this name in TASKS or OPTIMIZERS is there without a plugin."""
    rows = next(rows for found, _, rows in _KINDS if found == table)
    return name in rows and (table, name) not in _ADDED


def _executed(plugin: Plugin) -> ModuleType:
    module = sys.modules[plugin.module] = ModuleType(plugin.module)  # dataclasses and pickles look it up there
    try:
        exec(compile(plugin.source, plugin.name, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[plugin.module]
        if not isinstance(error, Exception | SystemExit):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(f"the plugin {plugin.name} cannot be loaded ({reason})") from error
    return module


def _rows(plugin: Plugin, table: str, found: Any) -> dict[str, Any]:
    """What it defines for this table, if names and rows are fit for it."""
    kind, there = next((kind, rows) for name, kind, rows in _KINDS if name == table)
    if not isinstance(found, Mapping) or not all(isinstance(row, kind) for row in found.values()):
        raise PluginError(f"{table} of the plugin {plugin.name} must be a dict of names and {kind.__name__}s")
    for name, row in found.items():
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
            raise PluginError(f"{name!r} in the plugin {plugin.name} is no name: take letters, digits, - and _")
        if name in there and (table, name) not in _ADDED:
            raise PluginError(f"{name!r} in the plugin {plugin.name} is there already: choose another name")
        if lack := _lack(row):
            raise PluginError(f"{name!r} in the plugin {plugin.name} {lack}")
    return dict(found)


def _lack(row: Task | Row) -> str | None:
    """What a row lacks that training is going to need, in words."""
    if isinstance(row, Task):
        missing = [name for name in ("load", "make") if getattr(type(row), name) is getattr(Task, name)]
        return f"has no {' and no '.join(missing)}: a task overrides them" if missing else None
    try:
        signature(row.make).bind([], lr=0.1, betas=(0.9, 0.999), fused=False, **row.options)
    except TypeError as error:
        return f"cannot be made from groups, lr, betas and fused ({error})"
    except ValueError:  # written in C, without a signature
        pass
    return None
