"""Run folders, read into plain numbers: an experiment per task, length and data; in it a series per setting.

Runs of different --out folders are different experiments: they may repeat each other on another machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from zlib import crc32

from ..compact import INDEX, stored_runs
from ..figures import styles
from ..histories import METRICS, History, State
from ..runs import CONFIG, DamagedRunError, Run
from ..wording import Estimate, counted, estimate, power
from .reading import Setting, StudyRun, Training, read_run

_LONGEST = 100  # characters in the name of a file


@dataclass(frozen=True)
class Series:
    """One setting of one optimizer: means and standard errors over seeds, epoch by epoch."""

    optimizer: str
    lr: float
    beta1: float
    beta2: float
    options: str
    seeds: tuple[int, ...]
    values: Mapping[str, tuple[Estimate, ...]]
    seconds: tuple[float, ...]  # mean over the runs that reached an epoch; nan if none did
    area: Estimate
    not_finite: int
    unfinished: int  # runs that are left out of the means, or all of them if none is finished
    commands: tuple[str, ...]
    environments: tuple[str, ...]
    histories: tuple[History, ...]  # in the order of the seeds

    @property
    def epochs(self) -> int:
        """The last epoch."""
        return len(self.seconds) - 1

    @property
    def label(self) -> str:
        """The optimizer with its options, which has a curve of its own."""
        return f"{self.optimizer} {self.options}".rstrip()

    @property
    def betas(self) -> str:
        """β₁ and β₂, where there are any."""
        return f"{self.beta1:g}, {self.beta2:g}" if self.beta1 or self.beta2 else ""

    @property
    def setting(self) -> str:
        """lr and, where there are any, β₁ and β₂."""
        return f"lr {power(self.lr)}" + (f", β {self.betas}" if self.betas else "")

    @property
    def seconds_per_epoch(self) -> float:
        """Seconds of training, without evaluations; nan if no epoch was finished."""
        reached = [epoch for epoch, seconds in enumerate(self.seconds) if not math.isnan(seconds)]
        return self.seconds[reached[-1]] / reached[-1] if reached[-1] else math.nan

    @property
    def has_ended(self) -> bool:
        """Whether its runs have ended; means of unfinished runs go as far as all of them came."""
        return all(history.state is not State.UNFINISHED for history in self.histories)

    def area_until(self, epoch: int) -> float:
        """The area under the mean validation loss over epochs 0 … ``epoch``."""
        return math.fsum(value.mean for value in self.values["valid_loss"][: epoch + 1])

    def best(self, metric: str) -> tuple[int, Estimate]:
        """The epoch with the best mean, and its value."""
        pick = max if metric.endswith("accuracy") else min
        return pick(enumerate(self.values[metric]), key=lambda pair: pair[1].mean)


@dataclass(frozen=True)
class Experiment:
    """All runs that may be compared: of one task, length, data and network."""

    task: str
    epochs: int
    subset: int | None
    fields: str
    series: tuple[Series, ...]
    out: str = ""  # the --out folder, if several have runs of these conditions
    folder: str = ""  # the end of the --out folder, as short as it is unique
    mark: str = ""  # tells two experiments with the same file name apart

    @property
    def title(self) -> str:
        """The task and how it was run."""
        parts = [self.task, counted(self.epochs, "epoch")]
        parts += [counted(self.subset, "training example")] if self.subset else []
        parts += [self.fields] if self.fields else []
        return ", ".join([*parts, *([f"in {self.out}"] if self.out else [])])

    @property
    def name(self) -> str:
        """The name for files and anchors."""
        raw = "-".join([self.task, f"e{self.epochs}", *([f"n{self.subset}"] if self.subset else []), self.fields])
        raw = f"{self.out}-{raw}" if self.out else raw
        clean = "".join(c if c.isalnum() or c in "-._" else "-" for c in raw).strip("-")
        short = clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}-{crc32(raw.encode()):08x}"
        return f"{short}-{self.mark}" if self.mark else short

    @cached_property
    def chosen(self) -> dict[str, Series]:
        """One setting per optimizer and options: of those that have ended, if any have, the one with the most seeds;
        among equals the one with the smallest area over the epochs that all have.
        """
        return {name: self._chosen(name) for name in styles(series.label for series in self.series)}

    def _chosen(self, label: str) -> Series:
        every = [series for series in self.series if series.label == label]
        every = [series for series in every if series.has_ended] or every
        last = min(series.epochs for series in every)
        return min(every, key=lambda series: (-len(series.seeds), series.area_until(last)))

    @property
    def is_search(self) -> bool:
        """Whether some optimizer was run at several settings."""
        return len(self.series) > len(self.chosen)


@dataclass(frozen=True)
class Collection:
    """All runs, and the reasons why some were left out."""

    experiments: tuple[Experiment, ...]
    studies: tuple[StudyRun, ...]
    left_out: tuple[str, ...]


def collect(folders: Iterable[Path]) -> Collection:
    """All runs in and below these folders. A run that cannot be read costs the report a sentence, nothing else."""
    trainings: list[Training] = []
    studies: list[StudyRun] = []
    left_out: list[str] = []
    for run in _runs(folders, left_out):
        try:
            content, lines = read_run(run)
        except ValueError as error:
            left_out.append(f"{run.folder}: {error}")
            continue
        trainings += [content] if isinstance(content, Training) else []
        studies += [content] if isinstance(content, StudyRun) else []
        left_out += lines
    experiments = sorted(_experiments(trainings, left_out), key=lambda experiment: experiment.title)
    names = Counter(experiment.name.casefold() for experiment in experiments)
    marked = (
        replace(e, mark=f"{crc32(e.title.encode()):08x}") if names[e.name.casefold()] > 1 else e for e in experiments
    )
    return Collection(tuple(marked), tuple(studies), tuple(left_out))


def _runs(folders: Iterable[Path], left_out: list[str]) -> Iterable[Run]:
    """Each run once; its folder, if there is one, rather than the stored run."""
    runs: dict[Path, Run] = {}
    for folder in folders:
        for path in sorted(folder.rglob(INDEX)):
            try:
                runs |= {run.folder.resolve(): run for run in stored_runs(path.parent).values()}
            except DamagedRunError as error:
                left_out.append(str(error))
        runs |= {path.parent.resolve(): Run(path.parent) for path in sorted(folder.rglob(CONFIG))}
    return runs.values()


def _experiments(trainings: Iterable[Training], left_out: list[str]) -> Iterator[Experiment]:
    groups: dict[tuple[object, Path, str], list[Training]] = {}
    for run in trainings:
        groups.setdefault((run.conditions, run.out, run.source), []).append(run)
    outs = [out for _, out, _ in groups]
    for (_, out, source), runs in groups.items():
        conditions = runs[0].conditions
        alike = [other for same, other, _ in groups if same == conditions]
        fields = [conditions.fields, f"source {source}" if source and alike.count(out) > 1 else ""]
        settings: dict[Setting, list[Training]] = {}
        for run in _each_once(runs, left_out):
            settings.setdefault(run.setting, []).append(run)
        short = _unique_end(out, alike)
        yield Experiment(
            **conditions._replace(fields=", ".join(filter(None, fields)))._asdict(),
            series=tuple(_series(setting, settings[setting]) for setting in sorted(settings)),
            out="" if short == "train" or set(alike) == {out} else short,  # train is where runs go by default
            folder=_unique_end(out, outs),
        )


def _each_once(runs: Iterable[Training], left_out: list[str]) -> Iterator[Training]:
    """One run of each setting and seed, if possible one that has ended; the others are left out."""
    first: dict[tuple[Setting, int], Training] = {}
    for run in sorted(runs, key=lambda run: run.history.state is State.UNFINISHED):
        kept = first.setdefault((run.setting, run.seed), run)
        if kept is not run:
            left_out.append(f"{run.folder}: the same setting and seed as {kept.folder}")
    yield from first.values()


def _unique_end(path: Path, others: Iterable[Path]) -> str:
    """The shortest end of a path that no other path has."""
    ends = [other.parts for other in others if other != path]
    count = next(n for n in range(1, len(path.parts) + 1) if all(end[-n:] != path.parts[-n:] for end in ends))
    return Path(*path.parts[-count:]).as_posix()


def _series(setting: Setting, runs: Sequence[Training]) -> Series:
    """The means over the finished runs, or over all if none is finished."""
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


def _mean_of_known(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
