"""One run folder, read and checked: what is wrong with it is a ValueError of one sentence, before anything is drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..compact import StoredRun
from ..histories import History, read_history
from ..limits import LARGEST, MOST, is_step_size
from ..optimizers import EARLIER_NAMES
from ..options import words
from ..plugins import Plugin, is_built_in
from ..runs import CONFIG, METRICS, Run
from ..studies.reading import Record, read
from .kinds import Kind, kind_of
from .table import Table

Config = dict[str, Any]
_DIGITS = 8  # of a digest, to tell a few apart
_PNG = b"\x89PNG\r\n\x1a\n"


class Conditions(NamedTuple):
    """What runs must share to be compared."""

    task: str
    epochs: int
    subset: int | None
    fields: str  # of the task, where they differ from the table's


class Setting(NamedTuple):
    """What runs must share to be averaged, besides."""

    optimizer: str
    lr: float
    beta1: float
    beta2: float
    options: str  # of the optimizer, where they are not what is usual


@dataclass(frozen=True)
class Training:
    """A run of ``hesscale train`` or ``hesscale sweep``."""

    conditions: Conditions
    setting: Setting
    seed: int
    folder: Path
    place: Path  # what was given as --out
    source: str  # digests of the text or the plugin that the task is from, as far as they were recorded
    history: History
    command: str
    environment: str


@dataclass(frozen=True)
class Study:
    """A run of another kind: its records if the kind is known, else the pictures its command drew."""

    folder: Path
    title: str
    kind: Kind | None
    config: Config
    records: tuple[Record, ...]
    tables: tuple[Table, ...]
    pictures: tuple[tuple[str, bytes], ...]  # name and content
    environment: str


def settings_in(run: Run) -> Config:
    """What its config.json says."""
    config = run.config if isinstance(run, StoredRun) else _json(run.folder / CONFIG)
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} holds no settings")
    return config


def read_training(run: Run, config: Config) -> Training:
    """The run's settings and what it measured."""
    conditions, setting, seed = _conditions(config), _setting(config), _whole(config, "seed")
    try:
        history = read_history(run)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        detail = str(error).removeprefix(f"{run.folder / METRICS}, ").replace("\n", " ")
        raise ValueError(f"{METRICS} is not readable ({type(error).__name__}: {detail})") from None
    if history is None:
        raise ValueError("nothing measured yet")
    if any(abs(value) > LARGEST for values in (history.seconds, *history.values.values()) for value in values):
        raise ValueError(f"{METRICS} has numbers beyond {LARGEST:g}")
    times = [seconds for seconds in history.seconds if not math.isnan(seconds)]
    if times[0] != 0 or any(after <= before for before, after in pairwise(times)):
        raise ValueError(f"the seconds in {METRICS} do not grow from 0, epoch by epoch")
    place, source = _place(run, conditions.task), _source(config)
    command, where = _command(config), _environment(run)
    return Training(conditions, setting, seed, run.folder, place, source, history, command, where)


def _place(run: Run, task: str) -> Path:
    """What was given as --out: the folder above task, optimizer, setting and seed; a task's folder that was copied, and
    so has another name, is a place of its own.
    """
    above = run.folder.resolve().parents
    return above[min(3 if len(above) > 2 and above[2].name == task else 2, len(above) - 1)]


def _source(config: Config) -> str:
    text = config.get("text") or ""
    if not isinstance(text, str):
        raise ValueError(f"its text is {text!r:.60}")
    plugin = "" if is_built_in("TASKS", str(config["task"])) else _plugin(config)
    return _printable("text", "-".join(filter(None, [text[:_DIGITS], plugin])))


def _plugin(config: Config) -> str:
    """The first digits of its digest; empty if there is none."""
    plugin = config.get("plugin")
    try:
        return Plugin(**plugin).digest[:_DIGITS] if plugin else ""
    except (TypeError, AttributeError):
        raise ValueError(f"its plugin is {plugin!r:.60}") from None


def read_study(run: Run, config: Config) -> tuple[Study, tuple[str, ...]]:
    """The study, and a sentence for every line of it that is left out."""
    kind = kind_of(config)
    try:
        found = read(run, kind.checks) if kind else None
        pictures = [(path.stem, path.read_bytes()) for path in sorted(run.folder.glob("*.png"))]
    except OSError as error:
        raise ValueError(f"not readable ({error.strerror or error})") from None
    records = found.records if found else ()
    shown = () if records else tuple(picture for picture in pictures if picture[1].startswith(_PNG))
    if not records and not shown:
        raise ValueError("nothing measured yet" if kind else "no figure in it")
    title = config.get("title") or ("cost of a step" if kind else "")
    name = f"{run.folder.resolve().name}{f': {title}' if title else ''}"
    tables = _tables(kind, config, records) if kind else ()
    study = Study(run.folder, name, kind, config, records, tables, shown, _environment(run))
    return study, found.left_out if found else ()


def _tables(kind: Kind, config: Config, records: tuple[Record, ...]) -> tuple[Table, ...]:
    """Each record was found whole; only together they show whether they are of one study."""
    try:
        return tuple(kind.tables(config, records))
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ValueError(f"its records do not go together ({type(error).__name__}: {error})") from None


def _conditions(config: Config) -> Conditions:
    fields = config.get("fields") or {}
    try:
        pairs = [*(fields.items() if isinstance(fields, Mapping) else fields)]
        pairs += [("processes", count) for count in [config.get("processes", 1)] if count != 1]
        written = ", ".join(f"{name} {value}" for name, value in pairs)
    except (TypeError, ValueError):
        raise ValueError(f"its fields are {fields!r:.60}") from None
    subset = None if config.get("subset") is None else _whole(config, "subset")
    return Conditions(_word(config, "task"), _whole(config, "epochs"), subset, _printable("fields", written))


def _setting(config: Config) -> Setting:
    name = _word(config, "optimizer")
    lr, beta1, beta2 = (_number(config, key) for key in ("lr", "beta1", "beta2"))
    if not is_step_size(lr):
        raise ValueError(f"its lr is {lr}")
    name = EARLIER_NAMES.get(name, name)
    return Setting(name, lr, beta1, beta2, _options(config, name))


def _options(config: Config, optimizer: str) -> str:
    """The options; of an optimizer from a plugin also from which."""
    options = config.get("options") or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"its options are {options!r:.60}")
    plugin = "" if is_built_in("OPTIMIZERS", optimizer) else _plugin(config)
    own = [f"plugin={plugin}"] if plugin else []
    return _printable("options", " ".join([*words(sorted(options.items())), *own]))


def _number(config: Config, name: str) -> float:
    value = config.get(name)
    if not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError(f"its {name} is {value!r:.60}")
    return float(value)


def _whole(config: Config, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or not 0 <= value <= MOST:
        raise ValueError(f"its {name} is {value!r:.60}")
    return value


def _word(config: Config, name: str) -> str:
    value = config.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"its {name} is {value!r:.60}")
    return _printable(name, value)


def _printable(name: str, value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"its {name} is {value!a:.60}")
    return value


def _command(config: Config) -> str:
    """The command that repeats the run today."""
    command = str(config.get("command", ""))
    for earlier, name in EARLIER_NAMES.items():
        command = command.replace(f"--optimizer {earlier} ", f"--optimizer {name} ")
    return command


def _environment(run: Run) -> str:
    """The run's environment in one line; none is no reason to leave the run out."""
    try:
        content: object = run.environment
    except (OSError, ValueError, TypeError, RecursionError):
        return ""
    return ", ".join(f"{name} {value}" for name, value in content.items()) if isinstance(content, dict) else ""


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path.name} is not readable ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not readable ({error})") from None
