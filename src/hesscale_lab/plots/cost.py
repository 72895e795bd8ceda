"""Figure 2 of the paper: seconds per step against the number of parameters, a row per panel, a column per batch size.

Once for whole steps, once for backward and update alone, as the paper has it, and once relative to Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..studies.cost import by_optimizer, of_kind
from ..studies.reading import Record
from ..wording import counted
from .drawn import Config, Drawn, Records, tidy, verbatim

_BLUE, _SKY, _PURPLE, _GREEN, _VERMILION = "#0072B2", "#56B4E9", "#CC79A7", "#009E73", "#D55E00"
_BLACK, _GRAY, _BROWN = "#222222", "#8C8C8C", "#8A5A2B"

Style = tuple[str, Literal["-", "--", "-.", ":", ""], str]

_STYLES: Mapping[str, Style] = {
    "SGD": (_GRAY, "-", "X"),
    "Adam": (_BLACK, "-", "P"),
    "Adam fused": (_BLACK, ":", "P"),
    "Adam compiled": (_BLACK, "--", "P"),
    "AdaHesScale": (_BLUE, "-", "o"),
    "AdaHesScale compiled": (_BLUE, "--", "o"),
    "AdaHesScale every=10": (_BLUE, "-.", "."),
    "AdaHesScale rank=1": (_BLUE, "--", "2"),
    "AdaHesScale rank=3": (_BLUE, "--", "3"),
    "AdaHesScaleGN": (_SKY, "-", "s"),
    "AdaBL89": (_PURPLE, "-", "^"),
    "AdaGGNMC": (_GREEN, "-", "v"),
    "GGN-MC, BackPACK": (_GREEN, "--", "v"),
    "AdaHessian": (_VERMILION, "-", "D"),
    "AdaHessian, pytorch_optimizer": (_VERMILION, "--", "D"),
    "exact GGN": (_GREEN, "", "*"),
    "exact H": (_VERMILION, "", "*"),
}
"""Color by kind of curvature (Okabe & Ito's), line by implementation: fused dotted, other libraries dashed."""

_OTHER: Style = (_BROWN, "-", "h")

_PANELS = {"outputs": "one hidden layer, more and more outputs", "layers": "more and more hidden layers"}


@dataclass(frozen=True)
class _View:
    """One figure: which field it shows and how."""

    title: str
    caption: str
    field: str
    label: str
    unit: float
    relative: bool = False  # on a linear scale, without exact diagonals, which would be far above it


_VIEWS: Mapping[str, _View] = {
    "cost": _View(
        "Time of a whole step",
        "Milliseconds of a whole step (forward, backward, update, clearing of gradients) against the number of "
        "parameters. Both scales are logarithmic.",
        "seconds",
        "milliseconds",
        1000,
    ),
    "cost-without-forward": _View(
        "Time of backward and update",
        "Milliseconds of backward and update alone, as the paper counts, against the number of parameters. Both scales "
        "are logarithmic.",
        "seconds_without_forward",
        "milliseconds",
        1000,
    ),
    "cost-relative": _View(
        "Time of a whole step relative to Adam's",
        "The time of a whole step divided by that of torch.optim.Adam in the same round, against the number of "
        "parameters. Exact diagonals are far above and left out.",
        "ratio",
        "time / Adam's",
        1,
        relative=True,
    ),
}


def figures(config: Config, records: Records) -> Iterator[Drawn]:
    """All figures; none if no panel was measured."""
    shown = [record for record in of_kind(records, "time") if record["panel"] in _PANELS]
    threads = "one thread" if config["threads"] == 1 else counted(config["threads"], "thread")
    for name, view in _VIEWS.items():
        rows = [record for record in shown if not (view.relative and record["exact"])]
        if rows:
            yield Drawn(name, view.caption, _figure(rows, view, f"{view.title}, {threads}"))


def _figure(records: Sequence[Record], view: _View, title: str) -> Figure:
    panels = [panel for panel in _PANELS if of_kind(records, "time", panel=panel)]
    batches = sorted({record["batch"] for record in records})
    size = (3.6 * len(batches) + 2.6, 3.9 * len(panels) + 0.5)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    # exact diagonals, at batch 1 only, would take most of a common scale of seconds
    grid = figure.subplots(
        len(panels), len(batches), squeeze=False, sharex="row", sharey="row" if view.relative else "none"
    )
    for panel, row in zip(panels, grid, strict=True):
        for batch, axes in zip(batches, row, strict=True):
            _draw_cells(axes, of_kind(records, "time", panel=panel, batch=batch), view)
            axes.set_title(f"{_PANELS[panel]}, batch {batch}", fontsize="small")
        for axes in row:  # only when all of the row is drawn: a limit set earlier would cut off what comes later
            _scale(axes, view)
        row[0].set_ylabel(f"{view.label} per step" if not view.relative else view.label)
    for axes in grid[-1]:
        axes.set_xlabel("parameters")
    names = by_optimizer(records)
    ordered = sorted(names, key=lambda name: list(_STYLES).index(name) if name in _STYLES else len(_STYLES))
    figure.legend(handles=[_key(name) for name in ordered], loc="outside right center", frameon=False, fontsize="small")
    figure.suptitle(title)
    return figure


def _key(name: str) -> Line2D:
    color, line, marker = _STYLES.get(name, _OTHER)
    return Line2D([], [], color=color, linestyle=line, marker=marker, markersize=5, label=verbatim(name))


def _draw_cells(axes: Axes, records: Sequence[Record], view: _View) -> None:
    for name, rows in by_optimizer(records).items():
        color, line, marker = _STYLES.get(name, _OTHER)
        points = sorted((row["parameters"], view.unit * row[view.field]) for row in rows)
        axes.plot(*zip(*points, strict=True), color=color, linestyle=line, marker=marker, markersize=4, linewidth=1.3)
    tidy(axes)


def _scale(axes: Axes, view: _View) -> None:
    axes.set_xscale("log")
    _label(axes.xaxis)
    if view.relative:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        _label(axes.yaxis)


def _label(axis: Axis) -> None:
    """Numbers at 1, 10, 100 …, or at 1, 2, 5, 10 … where the scale is short."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"
