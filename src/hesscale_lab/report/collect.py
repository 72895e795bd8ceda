"""Run folders, read into plain numbers: an experiment per task, length and data; in it a series per setting."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..histories import METRICS, History, State, read_history
from ..plots.colors import styles
from ..runs import CONFIG, ENVIRONMENT, Run
from .estimate import Estimate, estimate


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


@dataclass(frozen=True)
class Series:
    """One setting of one optimizer: its seeds' means and standard errors, epoch by epoch."""

    optimizer: str
    lr: float
    beta1: float
    beta2: float
    seeds: tuple[int, ...]
    values: Mapping[str, tuple[Estimate, ...]]
    seconds: tuple[float, ...]  # mean over the runs that came so far; nan if none did
    area: Estimate
    not_finite: int
    unfinished: int  # runs that are not part of the means, or all of them if none is finished
    commands: tuple[str, ...]
    environments: tuple[str, ...]

    @property
    def epochs(self) -> int:
        """The last epoch."""
        return len(self.seconds) - 1

    @property
    def setting(self) -> str:
        """α and, where there are any, β₁ and β₂."""
        betas = f", β {self.beta1:g}, {self.beta2:g}" if self.beta1 or self.beta2 else ""
        return f"α {power(self.lr)}{betas}"

    @property
    def seconds_per_epoch(self) -> float:
        """Measured training seconds, without evaluations; nan if no epoch was finished."""
        reached = [epoch for epoch, seconds in enumerate(self.seconds) if not math.isnan(seconds)]
        return self.seconds[reached[-1]] / reached[-1] if reached[-1] else math.nan

    def best(self, metric: str) -> tuple[int, Estimate]:
        """The epoch at which the mean is best, and its value there."""
        pick = max if metric.endswith("accuracy") else min
        return pick(enumerate(self.values[metric]), key=lambda pair: pair[1].mean)


@dataclass(frozen=True)
class Experiment:
    """All runs of one task that may be compared: as long as each other, on the same data and network."""

    task: str
    epochs: int
    subset: int | None
    fields: str
    series: tuple[Series, ...]

    @property
    def title(self) -> str:
        """The task and how it was run."""
        parts = [self.task, f"{self.epochs} epochs"]
        if self.subset:
            parts.append(f"{self.subset:,} training images")
        if self.fields:
            parts.append(self.fields)
        return ", ".join(parts)

    @property
    def name(self) -> str:
        """For files and anchors."""
        raw = "-".join([self.task, f"e{self.epochs}", *([f"n{self.subset}"] if self.subset else []), self.fields])
        return "".join(c if c.isalnum() or c in "-._" else "-" for c in raw).strip("-")

    @cached_property
    def chosen(self) -> dict[str, Series]:
        """One setting per optimizer: the one with the most seeds; among equals, with the smallest area."""
        chosen: dict[str, Series] = {}
        for name in styles(series.optimizer for series in self.series):
            own = [series for series in self.series if series.optimizer == name]
            chosen[name] = min(own, key=lambda series: (-len(series.seeds), series.area.mean))
        return chosen

    @property
    def is_search(self) -> bool:
        """Whether some optimizer was run at several settings."""
        return len(self.series) > len(self.chosen)


@dataclass(frozen=True)
class Study:
    """A run of another kind, with the figures that its command drew."""

    run: Run
    pictures: tuple[Path, ...]


@dataclass(frozen=True)
class Collection:
    """Everything found, and why some of it was left out."""

    experiments: tuple[Experiment, ...]
    studies: tuple[Study, ...]
    left_out: tuple[str, ...]


def collect(folders: Iterable[Path]) -> Collection:
    """All runs in and below these folders."""
    trained: dict[Conditions, dict[Setting, list[tuple[Run, History]]]] = {}
    studies, left_out = [], []
    for run in _runs(folders):
        try:
            config = run.config
            if config.get("kind") == "train":
                conditions, setting = _keys(config)
                history = read_history(run)
                if history is None:
                    left_out.append(f"{run.folder}: nothing measured yet")
                else:
                    trained.setdefault(conditions, {}).setdefault(setting, []).append((run, history))
            elif pictures := sorted(run.folder.glob("*.png")):
                studies.append(Study(run, tuple(pictures)))
            else:
                left_out.append(f"{run.folder}: no figure in it")
        except (OSError, ValueError, KeyError, TypeError) as error:
            left_out.append(f"{run.folder}: not readable as a run ({type(error).__name__}: {error})")
    experiments = [_experiment(key, settings) for key, settings in trained.items()]
    return Collection(tuple(sorted(experiments, key=lambda e: e.title)), tuple(studies), tuple(left_out))


def power(value: float) -> str:
    """1e-4 for powers of ten, else the number as it is."""
    exponent = round(math.log10(value)) if value > 0 else 0
    return f"1e{exponent}" if value > 0 and math.isclose(value, 10.0**exponent) and exponent else f"{value:g}"


def _runs(folders: Iterable[Path]) -> Iterator[Run]:
    found = {path.parent.resolve(): path.parent for folder in folders for path in sorted(folder.rglob(CONFIG))}
    yield from map(Run, found.values())


def _keys(config: Mapping[str, Any]) -> tuple[Conditions, Setting]:
    """The experiment that a run belongs to, and its setting there."""
    fields = config.get("fields") or {}
    pairs = [*(fields.items() if isinstance(fields, Mapping) else fields)]
    pairs += [("processes", count) for count in [config.get("processes", 1)] if count != 1]
    written = ", ".join(f"{name} {value}" for name, value in pairs)
    lr, beta1, beta2 = (float(config[name]) for name in ("lr", "beta1", "beta2"))
    conditions = Conditions(config["task"], int(config["epochs"]), config.get("subset"), written)
    return conditions, Setting(config["optimizer"], lr, beta1, beta2)


def _experiment(conditions: Conditions, settings: Mapping[Setting, list[tuple[Run, History]]]) -> Experiment:
    return Experiment(
        **conditions._asdict(), series=tuple(_series(setting, settings[setting]) for setting in sorted(settings))
    )


def _series(setting: Setting, runs: Sequence[tuple[Run, History]]) -> Series:
    """Finished runs only, if there are any; else what all unfinished ones have reached."""
    ended = [pair for pair in runs if pair[1].state is not State.UNFINISHED]
    used = sorted(ended or runs, key=lambda pair: pair[0].config["seed"])
    histories = [history for _, history in used]
    count = min(history.epochs for history in histories) + 1
    return Series(
        **setting._asdict(),
        seeds=tuple(run.config["seed"] for run, _ in used),
        values={
            name: tuple(estimate([h.values[name][e] for h in histories]) for e in range(count)) for name in METRICS
        },
        seconds=tuple(_mean_of_known([h.seconds[epoch] for h in histories]) for epoch in range(count)),
        area=estimate([math.fsum(history.values["valid_loss"][:count]) for history in histories]),
        not_finite=sum(history.state is State.NOT_FINITE for history in histories),
        unfinished=len(runs) - len(ended),
        commands=tuple(dict.fromkeys(run.config.get("command", "") for run, _ in used)),
        environments=tuple(dict.fromkeys(environment_line(run) for run, _ in used)),
    )


def _mean_of_known(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def environment_line(run: Run) -> str:
    """The run's environment in one line."""
    path = run.folder / ENVIRONMENT
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return ", ".join(f"{name} {value}" for name, value in content.items())
