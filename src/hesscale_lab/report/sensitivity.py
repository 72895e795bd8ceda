"""How the final test loss depends on the step size: a panel for each pair of β₁ and β₂, as in the paper's appendix."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from ..figures import styles, tidy, verbatim
from ..wording import power
from .collect import Experiment, Series

METRIC = "test_loss"
_LABELS = 6  # step sizes that have a label each; of more, the powers of ten


def draw(experiment: Experiment, *, columns: int | None = None) -> Figure:
    """Rows are β₁, columns β₂; a line per optimizer over the step sizes, bars of ± 2 standard errors.

    An optimizer without moments (SGD) is the same in all panels. A hollow mark: some run became not finite, and counts
    with its loss before training. A setting whose runs have not ended has no final loss yet, and no mark.
    """
    ended = tuple(series for series in experiment.series if series.has_ended)
    pairs = sorted({(s.beta1, s.beta2) for s in ended if s.beta1 or s.beta2}) or [(0.0, 0.0)]
    beta2s = len({beta2 for _, beta2 in pairs})
    columns = min(columns or beta2s, len(pairs))
    rows = -(-len(pairs) // columns)
    shown = styles(series.label for series in ended)
    wide = columns > 1
    legend_columns = 4 if columns > 2 else 2
    height = 2.9 * rows + 0.25 * -(-len(shown) // legend_columns) + 0.3
    figure = Figure(figsize=(4.2 * columns if wide else 4.2, height), layout="constrained", dpi=130)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=wide, sharey=True).flatten()
    for axes in panels[len(pairs) :]:
        axes.set_axis_off()
    for axes, pair in zip(panels, pairs, strict=False):
        _draw_pair(axes, pair, ended, shown)
        if wide:
            axes.label_outer()
        axes.set_title(f"β₁ = {pair[0]:g}, β₂ = {pair[1]:g}" if any(pair) else "no moments", fontsize="medium")
    handles = [
        Line2D([], [], color=color, marker=mark, markersize=5, label=verbatim(name))
        for name, (color, mark) in shown.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center" if wide else "outside upper center",
        ncols=legend_columns,
        frameon=False,
        fontsize="small",
    )
    return figure


def _draw_pair(
    axes: Axes, pair: tuple[float, float], series: tuple[Series, ...], shown: dict[str, tuple[str, str]]
) -> None:
    for name, (color, marker) in shown.items():
        line = [s for s in series if s.label == name and (s.beta1, s.beta2) in (pair, (0.0, 0.0))]
        line.sort(key=lambda s: s.lr)
        finals = [s.values[METRIC][-1] for s in line]
        lrs, means = [s.lr for s in line], [value.mean for value in finals]
        axes.plot(lrs, means, color=color, linewidth=1.5)
        bars = [0.0 if math.isnan(value.error) else 2 * value.error for value in finals]
        axes.errorbar(lrs, means, bars, color=color, linestyle="none")
        for fill, broken in ((color, False), ("white", True)):
            points = [(s.lr, mean) for s, mean in zip(line, means, strict=True) if bool(s.not_finite) is broken]
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=color, markersize=5.5, markerfacecolor=fill)
    axes.set(xscale="log", xlabel="lr", ylabel="final test loss")
    tried = sorted({s.lr for s in series})
    axes.xaxis.set_major_locator(FixedLocator(tried) if len(tried) <= _LABELS else LogLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda lr, _: power(lr)))
    if all(s.values[METRIC][-1].mean > 0 for s in series):  # panels share their axis
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    tidy(axes)
