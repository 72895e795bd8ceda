"""Error against time: one panel per stage and batch size, a line per sampled method, a point for each of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ..runs import Run

_STYLES = {
    "HesScale": ("#0072B2", "D"),
    "HesScaleGN": ("#56B4E9", "D"),
    "g²": ("#777777", "s"),
    "AdaHessian-MC": ("#D55E00", "o-"),
    "GGN-MC": ("#009E73", "o-"),
}
_BOUNDS = {"GGN": (":", "GGN, exact"), "|diag H|": ("--", "|diag H| (estimate 0)")}


def draw(run: Run) -> list[Path]:
    """The paths of the figure, PNG and SVG; none if nothing was timed."""
    records = [record for record in run.records if record["kind"] == "time"]
    cells = list(dict.fromkeys((record["stage"], record["batch"]) for record in records))
    if not cells:
        return []
    figure = Figure(
        figsize=(4.2 * min(2, len(cells)) + 2.2, 3.9 * (len(cells) + 1) // 2), layout="constrained", dpi=150
    )
    panels = figure.subplots((len(cells) + 1) // 2, min(2, len(cells)), squeeze=False, sharey=True).flatten()
    for axes, cell in zip(panels, cells, strict=True):
        _draw_cell(axes, [record for record in records if (record["stage"], record["batch"]) == cell])
        axes.set_title(f"{cell[0]}, batch {cell[1]}", fontsize="medium")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    figure.suptitle(f"Error of an estimate and the time it takes: {run.config['title']}")
    paths = [run.folder / f"time.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _draw_cell(axes: Axes, records: list[dict[str, Any]]) -> None:
    by_method: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_method.setdefault(record["method"], []).append(record)
    unit = by_method["HesScale"][0]
    axes.axvline(1000 * unit["seconds"], color="#cccccc", linewidth=1)
    for method, (color, style) in _STYLES.items():
        points = by_method[method]
        label = f"{method}, 1 … {points[-1]['samples']} samples" if points[0]["samples"] else method
        times, errors = [1000 * r["seconds"] for r in points], [r["error"] / unit["error"] for r in points]
        axes.plot(times, errors, style, color=color, markersize=7 if len(points) == 1 else 5, label=label)
    for method, (style, label) in _BOUNDS.items():
        error = by_method[method][0]["error"] / unit["error"]
        axes.axhline(error, color="#777777", linewidth=1, linestyle=style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="milliseconds per estimate", ylabel="L1 error / HesScale's")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
