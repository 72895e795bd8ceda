"""Run folders, read into plain numbers: an experiment per task, length and data; in it a series per setting.

Runs below different ``--out`` folders are different experiments: they may repeat each other on another machine. In one
folder a seed counts once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
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
    folder: str = ""  # the same in any case, as short as tells it from all others
    mark: str = ""  # where its name would be another's as well

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
        short = clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}-{crc32(raw.encode()):08x}"
        return f"{short}-{self.mark}" if self.mark else short

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
    trained: list[Training] = []
    studies: list[Study] = []
    left_out: list[str] = []
    for run in _runs(folders, left_out):
        try:
            config = settings_in(run)
            if config.get("kind") == "train":
                trained.append(read_training(run, config))
            else:
                study, lines = read_study(run, config)
                studies.append(study)
                left_out += lines
        except ValueError as error:
            left_out.append(f"{run.folder}: {error}")
    experiments = sorted(_experiments(trained, left_out), key=lambda experiment: experiment.title)
    return Collection(tuple(_told_apart(experiments)), tuple(studies), tuple(left_out))


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


class _Kind(NamedTuple):
    """What the runs of one experiment share."""

    conditions: Conditions
    place: Path
    source: str


def _grouped(trained: Iterable[Training]) -> dict[_Kind, list[Training]]:
    """The runs of each experiment. Those whose source was not recorded are of the one that is known, if one is."""
    groups: dict[_Kind, list[Training]] = {}
    for run in trained:
        groups.setdefault(_Kind(run.conditions, run.place, run.source), []).append(run)
    for kind in [kind for kind in groups if not kind.source]:
        known = [other for other in groups if other.source and other[:2] == kind[:2]]
        if len(known) == 1:
            groups[known[0]] += groups.pop(kind)
    return groups


def _experiments(trained: Iterable[Training], left_out: list[str]) -> Iterator[Experiment]:
    groups = _grouped(trained)
    for kind, runs in groups.items():
        alike = [other for other in groups if other.conditions == kind.conditions]
        place = _short(kind.place, [other.place for other in alike])
        several = len([other for other in alike if other.place == kind.place]) > 1
        words = [kind.conditions.fields, f"source {kind.source}" if several and kind.source else ""]
        settings: dict[Setting, list[Training]] = {}
        for run in _each_once(runs, left_out):
            settings.setdefault(run.setting, []).append(run)
        yield Experiment(
            **kind.conditions._replace(fields=", ".join(filter(None, words)))._asdict(),
            series=tuple(_series(setting, settings[setting]) for setting in sorted(settings)),
            place="" if place == USUAL or all(other.place == kind.place for other in alike) else place,
            folder=_short(kind.place, [other.place for other in groups]),
        )


def _each_once(runs: Iterable[Training], left_out: list[str]) -> Iterator[Training]:
    """One run of each setting and seed, one that has ended if there is any; the others are named."""
    kept: dict[tuple[Setting, int], Training] = {}
    for run in sorted(runs, key=lambda run: run.history.state is State.UNFINISHED):
        first = kept.setdefault((run.setting, run.seed), run)
        if first is not run:
            left_out.append(f"{run.folder}: the same setting and seed as {first.folder}")
    yield from kept.values()


def _short(place: Path, places: Sequence[Path]) -> str:
    """As much of the end of a path as tells it from the others."""
    others = [other.parts for other in places if other != place]
    count = next(n for n in range(1, len(place.parts) + 1) if all(o[-n:] != place.parts[-n:] for o in others))
    return Path(*place.parts[-count:]).as_posix()


def _told_apart(experiments: Sequence[Experiment]) -> Iterator[Experiment]:
    """Files and anchors have names of their own, also where signs were lost, such as in a b and a-b."""
    names = Counter(experiment.name.casefold() for experiment in experiments)
    for experiment in experiments:
        mark = f"{crc32(experiment.title.encode()):08x}" if names[experiment.name.casefold()] > 1 else ""
        yield replace(experiment, mark=mark)


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
