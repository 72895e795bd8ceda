"""Reads and checks one run folder: whatever is wrong with it is a ValueError of one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..compact import StoredRun
from ..histories import History, read_history
from ..options import option_words
from ..plugins import Plugin, is_built_in
from ..runs import CONFIG, MEASUREMENTS, Run
from ..settings import LARGEST, MOST, is_step_size, settings_of
from ..studies.study import Config, Records, Study, read
from ..studies.table import STUDIES
from ..wording import Table

_DIGITS = 8  # of a digest, enough to tell a few apart


class Conditions(NamedTuple):
    """What runs must have in common to be compared."""

    task: str
    epochs: int
    subset: int | None
    fields: str  # of the task, where they differ from the table's


class Setting(NamedTuple):
    """What runs must also have in common to be averaged."""

    optimizer: str
    lr: float
    beta1: float
    beta2: float
    options: str  # of the optimizer, where they differ from the default


@dataclass(frozen=True)
class Training:
    """A run of ``hesscale train`` or ``hesscale sweep``."""

    conditions: Conditions
    setting: Setting
    seed: int
    folder: Path
    out: Path  # the --out folder
    source: str  # digests of the text and the plugin that define the task
    history: History
    command: str
    environment: str


@dataclass(frozen=True)
class StudyRun:
    """A run of ``hesscale study``, ``quality`` or ``cost``."""

    folder: Path
    title: str
    study: Study
    config: Config
    records: Records
    tables: tuple[Table, ...]
    environment: str


def config_of(run: Run) -> dict[str, Any]:
    """The content of the run's config.json."""
    if isinstance(run, StoredRun):
        return run.config
    try:
        config = json.loads((run.folder / CONFIG).read_bytes())
    except OSError as error:
        raise ValueError(f"{CONFIG} is not readable ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG} is not readable ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} holds no settings")
    return config


def read_run(run: Run) -> tuple[Training | StudyRun, tuple[str, ...]]:
    """The run, and a sentence for every line of it that is left out."""
    config = config_of(run)
    if config.get("kind") == "train":
        return _read_training(run, config), ()
    if config.get("kind") not in STUDIES:
        raise ValueError(f"its kind is {config.get('kind')!a:.60}")
    return _read_study(run, config)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= MOST


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(_is_text(str(part)) for pair in value.items() for part in pair)


def _is_plugin(value: object) -> bool:
    return value is None or (isinstance(value, dict) and {*value} == {"name", "source"})


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("task", "optimizer"), lambda value: _is_text(value) and bool(value)),
    **dict.fromkeys(("epochs", "seed", "processes"), _is_count),
    **dict.fromkeys(("beta1", "beta2"), _is_number),
    **dict.fromkeys(("fields", "options"), _is_mapping),
    "lr": lambda value: _is_number(value) and is_step_size(value),
    "subset": lambda value: value is None or _is_count(value),
    "plugin": _is_plugin,
    "text": lambda value: value is None or _is_text(value),
}
"""The settings in a training's config.json, and what they may be."""


def _read_training(run: Run, config: Config) -> Training:
    for name, fits in _FIELDS.items():
        if not fits(config.get(name)):
            raise ValueError(f"its {name} is {config.get(name)!a:.60}")
    settings = settings_of(config)
    fields = [*config["fields"].items(), *([("processes", settings.processes)] if settings.processes != 1 else [])]
    options = [
        *option_words(settings.options),
        *_digest("plugin=", settings.plugin, is_built_in("OPTIMIZERS", settings.optimizer)),
    ]
    text = [settings.text[:_DIGITS]] if settings.text else []
    above = run.folder.resolve().parents  # setting, optimizer, task, --out; a renamed copy of a task is its own --out
    return Training(
        Conditions(
            settings.task, settings.epochs, settings.subset, ", ".join(f"{name} {value}" for name, value in fields)
        ),
        Setting(settings.optimizer, settings.lr, settings.beta1, settings.beta2, " ".join(options)),
        settings.seed,
        run.folder,
        out=above[min(3 if len(above) > 2 and above[2].name == settings.task else 2, len(above) - 1)],
        source="-".join([*text, *_digest("", settings.plugin, is_built_in("TASKS", settings.task))]),
        history=_read_history(run),
        command=str(config.get("command", "")),
        environment=_environment(run),
    )


def _digest(prefix: str, plugin: Plugin | None, built_in: bool) -> list[str]:
    return [] if plugin is None or built_in else [f"{prefix}{plugin.digest[:_DIGITS]}"]


def _read_history(run: Run) -> History:
    try:
        history = read_history(run)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        detail = str(error).removeprefix(f"{run.folder / MEASUREMENTS}, ").replace("\n", " ")
        raise ValueError(f"{MEASUREMENTS} is not readable ({type(error).__name__}: {detail})") from None
    if history is None:
        raise ValueError("nothing measured yet")
    if any(abs(value) > LARGEST for values in (history.seconds, *history.values.values()) for value in values):
        raise ValueError(f"{MEASUREMENTS} has numbers beyond {LARGEST:g}")
    times = [seconds for seconds in history.seconds if not math.isnan(seconds)]
    if times[0] != 0 or any(after <= before for before, after in pairwise(times)):
        raise ValueError(f"the seconds in {MEASUREMENTS} do not grow from 0, epoch by epoch")
    return history


def _read_study(run: Run, config: Config) -> tuple[StudyRun, tuple[str, ...]]:
    study = STUDIES[config["kind"]]
    try:
        reading = read(run, study.checks)
    except OSError as error:
        raise ValueError(f"not readable ({error.strerror or error})") from None
    if not reading.records:
        raise ValueError("nothing measured yet")
    try:  # each record fits, but perhaps not together
        tables = tuple(study.tables(config, reading.records))
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise ValueError(f"its records do not go together ({type(error).__name__}: {error})") from None
    title = f"{run.folder.resolve().name}: {config.get('title')}"
    return StudyRun(run.folder, title, study, config, reading.records, tables, _environment(run)), reading.left_out


def _environment(run: Run) -> str:
    """The run's environment in one line; empty if it cannot be read."""
    try:
        content: object = run.environment
    except (OSError, ValueError, TypeError, RecursionError):
        return ""
    return ", ".join(f"{name} {value}" for name, value in content.items()) if isinstance(content, dict) else ""
