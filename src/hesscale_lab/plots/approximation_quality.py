"""Figure 1 of the paper: the errors of all methods relative to HesScale's, and layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ..studies.approximation_quality import ZERO, Quality, Summary

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe & Ito: color-blind safe
_GRAY = "#777777"
_ROUNDING = 1e-10  # an error below this share of the largest one is rounding: the layer is exact
_SPREAD = 0.3  # width that the seeds of a method, or the methods of a layer, take around their place


def draw(quality: Quality, rows: Sequence[Summary], path: Path) -> Path:
    """The path of the PNG drawn."""
    figure = Figure(figsize=(11, 4.8), layout="constrained", dpi=160)
    total, layers = figure.subplots(1, 2, width_ratios=(1.1, 1))
    colors = _colors([row.method for row in rows])
    _draw_totals(total, rows, colors)
    _draw_layers(layers, quality, colors)
    network = "-".join(map(str, quality.widths))
    size = f"{len(quality.seeds)} seeds × {quality.examples} examples"
    figure.suptitle(f"Distance from the exact Hessian diagonal: {network} tanh network, {size}")
    figure.savefig(path)
    return path


def _colors(methods: Sequence[str]) -> dict[str, str]:
    others = [method for method in methods if method != ZERO]
    return {ZERO: _GRAY} | {method: _COLORS[i % len(_COLORS)] for i, method in enumerate(others)}


def _draw_totals(axes: Axes, rows: Sequence[Summary], colors: Mapping[str, str]) -> None:
    """A dot per seed, a bar at the mean. The scale is logarithmic because methods may differ by orders."""
    for place, row in enumerate(rows):
        color = colors[row.method]
        heights = [place + offset for offset in _offsets(len(row.relative_by_seed))]
        axes.plot(row.relative_by_seed, heights, "o", color=color, alpha=0.4, markersize=5, markeredgewidth=0)
        axes.plot([row.relative] * 2, [place - 0.26, place + 0.26], color=color, linewidth=3, solid_capstyle="round")
        axes.annotate(
            f"{row.relative:.1f}×",
            (row.relative, place - 0.3),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=color,
            weight="bold",
        )
    axes.set_yticks(range(len(rows)), [f"{ZERO}\n(estimate 0)" if row.method == ZERO else row.method for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.set_xscale("log")
    axes.set_xlim(left=0.7 * min(1.0, *(row.relative for row in rows)))
    axes.margins(x=0.1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("L1 error relative to HesScale (dots: seeds, bar: mean)")
    axes.set_title("All parameters", fontsize="medium")
    _tidy(axes, "x")


def _draw_layers(axes: Axes, quality: Quality, colors: Mapping[str, str]) -> None:
    """A dot per method and layer. Errors that are mere rounding have no place on a log axis and stand at its foot."""
    means = {errors.method: errors.layer_means for errors in quality.methods}
    smallest = _ROUNDING * max(max(layers) for layers in means.values())
    foot = min(error for layers in means.values() for error in layers if error > smallest) / 5
    for (method, layers), offset in zip(means.items(), _offsets(len(means)), strict=True):
        points = [(place + offset, error) for place, error in enumerate(layers, start=1)]
        rounded = [place for place, error in points if error <= smallest]
        seen = [point for point in points if point[1] > smallest]
        style = "o--" if method == ZERO else "o-"
        places, heights = [point[0] for point in seen], [point[1] for point in seen]
        axes.plot(places, heights, style, color=colors[method], linewidth=1, markersize=7, label=method)
        axes.plot(rounded, [foot] * len(rounded), "o", color="white", markeredgecolor=colors[method], markersize=7)
        for place in rounded:
            _say_exact(axes, place, foot, colors[method])
    axes.set_yscale("log")
    axes.set_ylim(bottom=foot / 1.8)
    names = [f"{i}\n{inputs}→{outputs}" for i, (inputs, outputs) in enumerate(pairwise(quality.widths), start=1)]
    axes.set_xticks(range(1, len(names) + 1), names)
    axes.set_xlabel("layer")
    axes.set_ylabel("mean L1 error")
    axes.set_title("Layer by layer (hollow: exact up to rounding)", fontsize="medium")
    axes.legend(frameon=False, fontsize="small", loc="lower left", ncols=2)
    _tidy(axes, "y")


def _say_exact(axes: Axes, place: float, height: float, color: str) -> None:
    axes.annotate(
        "exact",
        (place, height),
        xytext=(0, 9),
        textcoords="offset points",
        ha="center",
        rotation="vertical",
        fontsize="small",
        color=color,
    )


def _offsets(count: int) -> list[float]:
    """``count`` equal steps around zero, so that points which would hide one another stand side by side."""
    return [_SPREAD * (i / (count - 1) - 0.5) if count > 1 else 0.0 for i in range(count)]


def _tidy(axes: Axes, lines: Literal["x", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=lines, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
