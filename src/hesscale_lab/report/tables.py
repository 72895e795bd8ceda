"""The tables about trainings, as rows of text."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..wording import Table, percent, plain, power
from .collect import Experiment, Series
from .paper import PaperCurve

FINAL_HEADINGS = (
    "optimizer",
    "lr",
    "β₁, β₂",
    "seeds",
    "test accuracy %",
    "best @ epoch",
    "test loss",
    "best @ epoch",
    "area under valid. loss",
    "s per epoch",
)
PAPER_HEADINGS = ("paper: accuracy %", "paper: loss")
_NOTE = (
    "Mean ± standard error over seeds. Best: of the mean over seeds, over all epochs. Seconds are of training alone, "
    "without evaluations."
)
_BROKEN = (
    " A run that became not finite counts from then on with its values before training, as in the authors' harness."
)


def final_table(experiment: Experiment, paper: Mapping[str, PaperCurve]) -> Table:
    """One row per optimizer at its chosen setting, with standard errors; beside it the paper's values at that epoch."""
    beside = {name: curve for name, curve in paper.items() if name in experiment.chosen}
    broken = any(series.not_finite for series in experiment.chosen.values())
    rows = []
    for name, series in experiment.chosen.items():
        count = (str(series.not_finite or ""),) if broken else ()
        rows.append((*_final_row(series), *count, *(_paper_cells(beside.get(name), series.epochs) if beside else ())))
    headings = (*FINAL_HEADINGS, *(("not finite",) if broken else ()), *(PAPER_HEADINGS if beside else ()))
    note = _NOTE + (_BROKEN if broken else "")
    if unfinished := sum(series.unfinished for series in experiment.series):
        note += f" Runs still unfinished: {unfinished}."
    if beside:
        images = ", on all training examples" if experiment.subset else ""
        note += f" Paper: the authors' runs at the same epoch, at the setting they chose{images}."
    return Table("Final results", headings, tuple(rows), note)


def _final_row(series: Series) -> tuple[str, ...]:
    return (
        series.label,
        power(series.lr),
        series.betas,
        _seeds(series),
        percent(series.values["test_accuracy"][-1]),
        _best(series, "test_accuracy"),
        plain(series.values["test_loss"][-1]),
        _best(series, "test_loss"),
        plain(series.area, digits=2),
        "" if math.isnan(series.seconds_per_epoch) else f"{series.seconds_per_epoch:.3g}",
    )


def _seeds(series: Series) -> str:
    return f"{len(series.seeds)}" + ("" if series.has_ended else f" (at epoch {series.epochs})")


def _best(series: Series, metric: str) -> str:
    epoch, value = series.best(metric)
    shown = f"{100 * value.mean:.2f}" if metric.endswith("accuracy") else f"{value.mean:.4f}"
    return f"{shown} @ {epoch}"


def _paper_cells(curve: PaperCurve | None, epoch: int) -> tuple[str, str]:
    if curve is None or epoch > curve.epochs:
        return "", ""
    return percent(curve.values["test_accuracy"][epoch]), plain(curve.values["test_loss"][epoch])


def settings_table(experiment: Experiment) -> Table:
    """Every setting of a search, best first for each optimizer; after them those that have not ended."""
    order = list(experiment.chosen)
    series = sorted(
        experiment.series,
        key=lambda s: (order.index(s.label), not s.has_ended, s.area.mean if s.has_ended else s.lr),
    )
    rows = tuple(
        (
            s.label,
            power(s.lr),
            s.betas,
            _seeds(s),
            plain(s.area, digits=2),
            plain(s.values["test_loss"][-1]),
            percent(s.values["test_accuracy"][-1]),
            str(s.not_finite or ""),
        )
        for s in series
    )
    headings = ("optimizer", "lr", "β₁, β₂", "seeds", "area under valid. loss", "test loss", "test accuracy %")
    return Table("All settings", (*headings, "not finite"), rows)
