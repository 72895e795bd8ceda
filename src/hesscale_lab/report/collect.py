"""Run folders, read into plain numbers: an experiment per task, length and data; in it a series per setting.

Runs below different ``--out`` folders are different experiments: they may repeat each other on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zlib import crc32

from ..compact import INDEX, stored_runs
from ..histories import METRICS, History, State
from ..plots.colors import styles
from ..runs import CONFIG, DamagedRunError, Run
from ..wording import counted, power
from .estimate import Estimate, estimate
from .reading import Conditions, Setting, Study, Training, read_study, read_training, settings_in

USUAL = "train"
"""The folder whose experiments need no other name."""

_LONGEST = 100  # characters of a file's name, which systems limit


@dataclass(frozen=True)
class Series:
    """One setting of one optimizer: its seeds' means and standard errors, epoch by epoch."""

    optimizer: str
    lr: float
    beta1: float
    beta2: float
    options: str
    seeds: tuple[int, ...]
    values: Mapping[str, tuple[Estimate, ...]]
    seconds: tuple[float, ...]  # mean over the runs that came so far; nan if none did
    area: Estimate
    not_finite: int
    unfinished: int  # runs that are not part of the means, or all of them if none is finished
    commands: tuple[str, ...]
    environments: tuple[str, ...]
    histories: tuple[History, ...]  # as the seeds

    @property
    def epochs(self) -> int:
        """The last epoch."""
        return len(self.seconds) - 1

    @property
    def label(self) -> str:
        """The optimizer with its options: what has a curve of its own."""
        return f"{self.optimizer} {self.options}".rstrip()

    @property
    def setting(self) -> str:
        """lr and, where there are any, β₁ and β₂."""
        betas = f", β {self.beta1:g}, {self.beta2:g}" if self.beta1 or self.beta2 else ""
        return f"lr {power(self.lr)}{betas}"

    @property
    def seconds_per_epoch(self) -> float:
        """Measured training seconds, without evaluations; nan if no epoch was finished."""
        reached = [epoch for epoch, seconds in enumerate(self.seconds) if not math.isnan(seconds)]
        return self.seconds[reached[-1]] / reached[-1] if reached[-1] else math.nan

    @property
    def has_ended(self) -> bool:
        """Whether its runs came to their end; means of unfinished ones go as far as all of these came."""
        return all(history.state is not State.UNFINISHED for history in self.histories)

    def area_until(self, epoch: int) -> float:
        """The area under the mean validation loss over epochs 0 … ``epoch``."""
        return math.fsum(value.mean for value in self.values["valid_loss"][: epoch + 1])

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
    place: str = ""  # the folder of its runs, where another one has the same kind of runs

    @property
    def title(self) -> str:
        """The task and how it was run."""
        parts = [self.task, counted(self.epochs, "epoch")]
        if self.subset:
            parts.append(counted(self.subset, "training example"))
        if self.fields:
            parts.append(self.fields)
        if self.place:
            parts.append(f"in {self.place}")
        return ", ".join(parts)

    @property
    def name(self) -> str:
        """For files and anchors."""
        raw = "-".join([self.task, f"e{self.epochs}", *([f"n{self.subset}"] if self.subset else []), self.fields])
        raw = f"{self.place}-{raw}" if self.place else raw
        clean = "".join(c if c.isalnum() or c in "-._" else "-" for c in raw).strip("-")
        return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}-{crc32(raw.encode()):08x}"

    @cached_property
    def chosen(self) -> dict[str, Series]:
        """One setting per optimizer and its options: of those that have ended, if there are any, the one with the most
        seeds; among equals, with the smallest area over the epochs that all of them have.
        """
        chosen: dict[str, Series] = {}
        for name in styles(series.label for series in self.series):
            own = [series for series in self.series if series.label == name]
            chosen[name] = _best_of([series for series in own if series.has_ended] or own)
        return chosen

    @property
    def is_search(self) -> bool:
        """Whether some optimizer was run at several settings."""
        return len(self.series) > len(self.chosen)


def _best_of(own: Sequence[Series]) -> Series:
    last = min(series.epochs for series in own)
    return min(own, key=lambda series: (-len(series.seeds), series.area_until(last)))


@dataclass(frozen=True)
class Collection:
    """Everything found, and why some of it was left out."""

    experiments: tuple[Experiment, ...]
    studies: tuple[Study, ...]
    left_out: tuple[str, ...]


def collect(folders: Iterable[Path]) -> Collection:
    """All runs in and below these folders. One that cannot be read costs the report a sentence, nothing else."""
    trained: dict[Conditions, dict[Path, dict[Setting, list[Training]]]] = {}
    studies: list[Study] = []
    left_out: list[str] = []
    for run in _runs(folders, left_out):
        try:
            config = settings_in(run)
            if config.get("kind") == "train":
                training = read_training(run, config)
                place = trained.setdefault(training.conditions, {}).setdefault(_place(run), {})
                place.setdefault(training.setting, []).append(training)
            else:
                study, lines = read_study(run, config)
                studies.append(study)
                left_out += lines
        except ValueError as error:
            left_out.append(f"{run.folder}: {error}")
    experiments = [
        _experiment(key, settings, "" if len(places) == 1 or place.name == USUAL else place.name)
        for key, places in trained.items()
        for place, settings in places.items()
    ]
    return Collection(tuple(sorted(experiments, key=lambda e: e.title)), tuple(studies), tuple(left_out))


def _place(run: Run) -> Path:
    """What was given as --out: the folder above task, optimizer, setting and seed."""
    return run.folder.resolve().parents[min(3, len(run.folder.resolve().parents) - 1)]


def _runs(folders: Iterable[Path], left_out: list[str]) -> Iterator[Run]:
    """Each run once: its folder, or where there is none what was stored of it."""
    found: dict[Path, Run] = {}
    for folder in folders:
        for path in sorted(folder.rglob(INDEX)):
            try:
                found |= {run.folder.resolve(): run for run in stored_runs(path.parent)}
            except DamagedRunError as error:
                left_out.append(str(error))
        found |= {path.parent.resolve(): Run(path.parent) for path in sorted(folder.rglob(CONFIG))}
    yield from found.values()


def _experiment(conditions: Conditions, settings: Mapping[Setting, list[Training]], place: str) -> Experiment:
    series = tuple(_series(setting, settings[setting]) for setting in sorted(settings))
    return Experiment(**conditions._asdict(), series=series, place=place)


def _series(setting: Setting, runs: Sequence[Training]) -> Series:
    """Finished runs only, if there are any; else what all unfinished ones have reached."""
    ended = [run for run in runs if run.history.state is not State.UNFINISHED]
    used = sorted(ended or runs, key=lambda run: run.seed)
    histories = [run.history for run in used]
    count = min(history.epochs for history in histories) + 1
    return Series(
        **setting._asdict(),
        seeds=tuple(run.seed for run in used),
        values={
            name: tuple(estimate([h.values[name][e] for h in histories]) for e in range(count)) for name in METRICS
        },
        seconds=tuple(_mean_of_known([h.seconds[epoch] for h in histories]) for epoch in range(count)),
        area=estimate([math.fsum(history.values["valid_loss"][:count]) for history in histories]),
        not_finite=sum(history.state is State.NOT_FINITE for history in histories),
        unfinished=len(runs) - len(ended),
        commands=tuple(dict.fromkeys(run.command for run in used)),
        environments=tuple(dict.fromkeys(run.environment for run in used)),
        histories=tuple(histories),
    )


def _mean_of_known(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
