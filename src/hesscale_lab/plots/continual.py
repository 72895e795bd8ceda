"""What is left of each task at the end: a panel per benchmark, a line per method."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..report.estimate import estimate
from .drawn import Config, Drawn, Records, draw_line, tidy, verbatim

STYLES = {
    "none": ("#8C8C8C", "X"),
    "L2": ("#222222", "P"),
    "EWC, g² per example": ("#D55E00", "D"),
    "EWC, HesScale": ("#0072B2", "o"),
    "EWC, HesScaleGN": ("#56B4E9", "s"),
    "EWC, HesScale rank=3": ("#E69F00", "^"),
}
_CAPTION = (
    "Test accuracy on each of five tasks after the last was learned, means over seeds with bars of ± 2 standard "
    "errors, each method at the penalty strength that was best for it on images apart."
)


def figures(config: Config, records: Records) -> Iterator[Drawn]:
    """One figure; none without records of seeds."""
    own = [record for record in records if record["role"] == "seed"]
    benchmarks = [name for name in config["benchmarks"] if any(record["benchmark"] == name for record in own)]
    if not benchmarks:
        return
    figure = Figure(figsize=(4.4 * len(benchmarks), 3.9), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(benchmarks), squeeze=False)[0]
    for axes, benchmark in zip(panels, benchmarks, strict=True):
        _draw(axes, [record for record in own if record["benchmark"] == benchmark])
        axes.set_title(verbatim(benchmark), fontsize="medium")
    panels[0].set_ylabel("test accuracy at the end")
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    yield Drawn("continual", _CAPTION, figure)


def _draw(axes: Axes, records: Records) -> None:
    for place, (name, (color, marker)) in enumerate(STYLES.items()):
        own = [record["at_the_end"] for record in records if record["method"] == name]
        if not own:
            continue
        found = [estimate(values) for values in zip(*own, strict=True)]
        places = [number + 1 + 0.05 * (place - len(STYLES) / 2) for number in range(len(found))]
        draw_line(axes, places, found, color=color, marker=marker, label=name)
    axes.set_xlabel("task")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    tidy(axes)
