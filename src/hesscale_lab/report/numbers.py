"""The numbers behind a report as CSV files, a row per epoch, estimate or measured step, for other programs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..histories import METRICS
from ..studies.approximation_quality import STAGES, summarize
from .collect import Collection, Experiment, Series
from .kinds import COST, QUALITY, Kind
from .per_second import baseline_of, comparisons

Row = Mapping[str, Any]


def write_numbers(collection: Collection, out: Path) -> list[Path]:
    """The paths of report.csv (trainings), seconds.csv, quality.csv and cost.csv, those that have something in them."""
    files = {
        "report.csv": _trainings(collection.experiments),
        "seconds.csv": _per_second(collection.experiments),
        "quality.csv": _estimates(collection),
        "cost.csv": _steps(collection),
    }
    return [path for name, rows in files.items() if (path := _write(out / name, list(rows)))]


def _write(path: Path, rows: list[Row]) -> Path | None:
    if not rows:
        path.unlink(missing_ok=True)  # of an earlier report in the same folder
        return None
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _trainings(experiments: Iterable[Experiment]) -> Iterator[Row]:
    """Means over seeds and their standard errors (_se), every setting, every epoch."""
    for experiment in experiments:
        for series in experiment.series:
            chosen = int(experiment.chosen[series.label] is series)
            for row in _epochs(series):
                yield {**_conditions(experiment), "chosen": chosen, **row}


def _epochs(series: Series) -> Iterator[Row]:
    setting = {name: getattr(series, name) for name in ("optimizer", "options", "lr", "beta1", "beta2", "not_finite")}
    for epoch in range(series.epochs + 1):
        row = {**setting, "seeds": len(series.seeds), "epoch": epoch, "seconds": _known(series.seconds[epoch])}
        for name in METRICS:
            mean, error = series.values[name][epoch]
            row |= {name: mean, f"{name}_se": _known(error)}
        yield row


def _per_second(experiments: Iterable[Experiment]) -> Iterator[Row]:
    """Every optimizer beside Adam, by measured seconds."""
    for experiment in experiments:
        for found in comparisons(experiment):
            series = found.series
            row = {**_conditions(experiment), "against": baseline_of(experiment), "optimizer": series.optimizer}
            row |= {"options": series.options, "lr": series.lr, "beta1": series.beta1, "beta2": series.beta2}
            row |= {"seeds": found.seeds, "reached": found.reached}
            for name in ("seconds", "time", "area"):
                mean, error = getattr(found, name) or (math.nan, math.nan)
                row |= {name: _known(mean), f"{name}_se": _known(error)}
            yield {**row, "time_verdict": found.time_verdict, "area_verdict": found.area_verdict}


def _conditions(experiment: Experiment) -> dict[str, Any]:
    return {
        "place": experiment.folder,
        "task": experiment.task,
        "subset": experiment.subset,
        "fields": experiment.fields,
        "of_epochs": experiment.epochs,
    }


def _known(value: float) -> float | str:
    """An empty cell where there is no number."""
    return "" if math.isnan(value) else value


def _estimates(collection: Collection) -> Iterator[Row]:
    """Mean L1 errors of every estimate, in absolute terms and relative to HesScale's."""
    for folder, records in _of_kind(collection, QUALITY):
        for stage in STAGES:
            for line in summarize(records, stage):
                common = {"folder": folder, "stage": stage, "method": line.method}
                yield {**common, "seeds": len(line.relative_by_seed), "error": line.error, "relative": line.relative}


def _steps(collection: Collection) -> Iterator[Row]:
    """Every record of time and memory with its single numbers."""
    for folder, records in _of_kind(collection, COST):
        for record in records:
            yield {"folder": folder, **{name: value for name, value in record.items() if not isinstance(value, list)}}


def _of_kind(collection: Collection, kind: Kind) -> Iterator[tuple[str, tuple[Row, ...]]]:
    for study in collection.studies:
        if study.kind is kind:
            yield str(study.folder), study.records
