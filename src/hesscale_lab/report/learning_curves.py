"""Learning curves: loss and accuracy on the three splits, by epoch or by measured seconds, beside the paper's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)

from ..figures import styles, tidy, verbatim
from ..histories import METRICS, QUANTITIES, SPLITS
from .collect import Experiment, Series
from .paper import PaperCurve

_SPLIT_NAMES = {"train": "training", "valid": "validation", "test": "test"}
_WIDTH = 4.2  # inches of a panel
_MARKS = 8  # markers on a line; more would hide it
_HIGH = 0.93  # accuracies above it differ too little to be seen on a linear scale
_LEAST_ERROR = 2e-4  # added to the error, so that 100 % has a place on its scale
_ACCURACIES = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1)
_ROOM = 0.03  # share of an axis beside the first and the last point, so that their marks are whole


class Against(StrEnum):
    """What runs along the horizontal axis."""

    EPOCHS = "epochs"
    SECONDS = "seconds"


def draw(
    experiment: Experiment, paper: Mapping[str, PaperCurve], *, against: Against = Against.EPOCHS, columns: int = 3
) -> Figure:
    """Six panels; a line per optimizer with a band of ± 2 standard errors, dashes for the paper.

    The paper's curves have no place on the axis of seconds: no times of its trainings were published.
    """
    shown = experiment.chosen
    beside = {name: curve for name, curve in paper.items() if name in shown and against is Against.EPOCHS}
    rows = len(METRICS) // columns
    wide = columns > 1
    handles = list(_handles(shown, with_paper=bool(beside)))
    across = max(1, min(4, int(_WIDTH * columns / _width_of(handles)))) if wide else 1
    lines = math.ceil(len(shown) / across) if wide else len(shown) + 2
    figure = Figure(
        figsize=(_WIDTH * columns, (3.1 if wide else 2.9) * rows + 0.25 * lines + 0.3), layout="constrained", dpi=130
    )
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, metric in zip(panels, _metrics(columns), strict=True):
        _draw_metric(axes, metric, shown, beside, against)
    figure.legend(
        handles=handles,
        loc="outside lower center" if wide else "outside upper center",
        ncols=across,
        frameon=False,
        fontsize="small",
    )
    return figure


def _width_of(handles: Sequence[Line2D]) -> float:
    """About how many inches the longest entry of a legend in small print takes."""
    return 0.4 + 0.062 * max((len(str(handle.get_label())) for handle in handles), default=0)


def _metrics(columns: int) -> Iterator[str]:
    """A row of losses above a row of accuracies; in a single column, one split's pair after the other."""
    if columns > 1:
        yield from METRICS
    else:
        yield from (f"{split}_{quantity}" for split in reversed(SPLITS) for quantity in QUANTITIES)


def _draw_metric(
    axes: Axes, metric: str, shown: Mapping[str, Series], beside: Mapping[str, PaperCurve], against: Against
) -> None:
    split, quantity = metric.split("_")
    most = 1.0 if quantity == "accuracy" else math.inf
    drawn: list[float] = []
    for name, (color, marker) in styles(shown).items():
        series = shown[name]
        places = list(range(series.epochs + 1)) if against is Against.EPOCHS else list(series.seconds)
        means = [value.mean for value in series.values[metric]]
        low = [value.mean - 2 * value.error for value in series.values[metric]]
        high = [min(most, value.mean + 2 * value.error) for value in series.values[metric]]
        every = max(1, len(means) // _MARKS)
        axes.fill_between(places, low, high, color=color, alpha=0.16, linewidth=0)
        axes.plot(places, means, color=color, marker=marker, markevery=every, markersize=4.5, linewidth=1.5)
        drawn += means
        if name in beside:
            theirs = [value.mean for value in beside[name].values[metric][: len(means)]]
            axes.plot(range(len(theirs)), theirs, color=color, linestyle=(0, (4, 2)), linewidth=1.1, alpha=0.9)
            drawn += theirs
    axes.set_title(f"{_SPLIT_NAMES[split]} {quantity}", fontsize="medium")
    axes.set_xlabel("epoch" if against is Against.EPOCHS else "seconds of training, measured")
    axes.margins(x=_ROOM)
    axes.xaxis.set_major_locator(MaxNLocator(integer=against is Against.EPOCHS, nbins=6))
    if quantity == "loss" and min(drawn) > 0:
        _log_scale(axes)
    elif quantity == "accuracy":
        _accuracy_scale(axes, min(drawn), max(drawn))
    tidy(axes)


def _accuracy_scale(axes: Axes, lowest: float, highest: float) -> None:
    """Linear; but where accuracies come close to 100 %, equal steps for equal factors of the error 1 − accuracy.

    98 and 99 % then stand as far apart as 80 and 90 %.
    """
    if highest > _HIGH:
        axes.set_yscale("function", functions=(_height, _accuracy))
        bottom, top = _height(np.array([min(lowest, 0.0), highest]))
        room = _ROOM * (top - bottom)
        axes.set_ylim(*_accuracy(np.array([bottom - room, top + room])))
        axes.yaxis.set_major_locator(FixedLocator(_ACCURACIES))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda accuracy, _: f"{100 * accuracy:g}%"))
    else:
        room = 2 * _ROOM * (highest - lowest) + 0.002
        axes.set_ylim(lowest - room, highest + room)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))


def _height(accuracy: Any) -> Any:
    return -np.log10(np.maximum(1 + _LEAST_ERROR - np.asarray(accuracy), _LEAST_ERROR / 100))


def _accuracy(height: Any) -> Any:
    return 1 + _LEAST_ERROR - 10.0 ** -np.asarray(height)


def _log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1, 1.5, 2, 3, 4, 5, 7) if high < 8 * low else (1, 2, 5) if high < 300 * low else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if len(steps) > 1:
        axes.yaxis.set_minor_locator(NullLocator())


def _handles(shown: Mapping[str, Series], *, with_paper: bool) -> Iterator[Line2D]:
    for name, (color, marker) in styles(shown).items():
        series = shown[name]
        broken = f", {series.not_finite} of {len(series.seeds)} not finite" if series.not_finite else ""
        label = f"{verbatim(name)} ({series.setting}{broken})"
        yield Line2D([], [], color=color, marker=marker, markersize=4.5, label=label)
    if with_paper:
        yield Line2D([], [], color="#555555", linestyle=(0, (4, 2)), linewidth=1.1, label="dashes: the paper's curves")
