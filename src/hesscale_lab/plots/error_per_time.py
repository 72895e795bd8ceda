"""Error against time: one panel per stage and batch size, a line per sampled method, a point for each of the others."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ..studies.approximation_quality import REFERENCE
from ..studies.error_per_time import cells_of
from ..studies.reading import by
from .drawn import Config, Drawn, Records, tidy, verbatim

_STYLES = {
    "HesScale": ("#0072B2", "D"),
    "HesScale rank=1": ("#0072B2", "o"),
    "HesScale rank=3": ("#0072B2", "^"),
    "HesScale rank=full": ("#0072B2", "*"),
    "HesScaleGN": ("#56B4E9", "D"),
    "g²": ("#777777", "s"),
    "AdaHessian-MC": ("#D55E00", "o-"),
    "GGN-MC": ("#009E73", "o-"),
}
_BOUNDS = {"GGN": (":", "GGN, exact"), "|diag H|": ("--", "|diag H| (estimate 0)")}
_ROUNDING = 1e-10  # an error below this share of HesScale's is rounding, and has no place on a log axis

_CAPTION = (
    "Error of every estimate, in units of HesScale's, against the milliseconds it takes (gray line: HesScale's), on "
    "logarithmic scales. Sampled estimates are lines over the number of samples. Hollow, at the foot: exact."
)


def figures(config: Config, records: Records) -> Iterator[Drawn]:
    """One figure with a panel per stage and batch size; none if nothing was timed."""
    cells = cells_of(records)
    if not cells:
        return
    columns = min(2, len(cells))
    rows = -(-len(cells) // columns)
    figure = Figure(figsize=(4.2 * columns + 2.2, 3.9 * rows), layout="constrained", dpi=150)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes in panels[len(cells) :]:
        axes.set_axis_off()
    for axes, ((stage, batch), cell) in zip(panels, cells.items(), strict=False):
        _draw_cell(axes, cell)
        axes.set_title(f"{stage}, batch {batch}", fontsize="medium")
    for axes in panels[: len(cells)]:  # when all are drawn, since they share an axis
        _scale(axes)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    figure.suptitle(f"Error of an estimate and the time it takes: {verbatim(config['title'])}")
    yield Drawn("time", _CAPTION, figure)


def _draw_cell(axes: Axes, records: Records) -> None:
    by_method = by(records, "method")
    unit = by_method[REFERENCE][0]
    axes.axvline(1000 * unit["seconds"], color="#cccccc", linewidth=1)
    for method, (color, style) in _STYLES.items():
        points = by_method.get(method, [])
        if not points:
            continue
        label = f"{method}, 1 … {points[-1]['samples']} samples" if points[0]["samples"] else method
        times, errors = [1000 * r["seconds"] for r in points], [r["error"] / unit["error"] for r in points]
        if max(errors) < _ROUNDING:
            axes.plot(times, 0.03, style, color=color, fillstyle="none", transform=axes.get_xaxis_transform())
            times, errors = [], []
        axes.plot(times, errors, style, color=color, markersize=7 if len(points) == 1 else 5, label=label)
    for method, (style, label) in _BOUNDS.items():
        for record in by_method.get(method, ()):
            height = record["error"] / unit["error"]
            axes.axhline(height, color="#777777", linewidth=1, linestyle=style, label=label)
    tidy(axes)


def _scale(axes: Axes) -> None:
    axes.set(xscale="log", yscale="log", xlabel="milliseconds per estimate", ylabel="L1 error / HesScale's")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
