"""Returns over step sizes: a panel for each environment and algorithm, a line for each optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ..report.reinforcement_tables import Outcomes, by_problem
from ..wording import power
from .colors import styles
from .drawn import Config, Drawn, Records, tidy, verbatim

Line = Literal["-", "--"]

_CAPTION = (
    "Mean return at the end of training over the step size, bars of ± one standard error over seeds. Dashed: the "
    "paper's algorithm, without a bound."
)


def figures(config: Config, records: Records) -> Iterator[Drawn]:
    """One figure with all panels, if there is anything to draw."""
    problems = by_problem(records)
    if not problems:
        return
    environments = [*dict.fromkeys(environment for environment, _ in problems)]
    algorithms = [*dict.fromkeys(algorithm for _, algorithm in problems)]
    size = (3.6 * len(environments) + 0.4, 2.7 * len(algorithms) + 0.9)
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    panels = figure.subplots(len(algorithms), len(environments), squeeze=False, sharex=True)
    shown = _shown([name for optimizers in problems.values() for name in optimizers])
    for row, algorithm in zip(panels, algorithms, strict=True):
        for axes, environment in zip(row, environments, strict=True):
            _draw(axes, problems.get((environment, algorithm), {}), shown)
            axes.set_title(f"{environment}, {algorithm}", fontsize="medium")
    for axes in panels[-1]:
        axes.set_xlabel("lr")
    for row in panels:
        row[0].set_ylabel("return")
    handles = [
        Line2D([], [], color=color, marker=mark, linestyle=line, markersize=5, label=verbatim(name))
        for name, (color, mark, line) in shown.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    yield Drawn("reinforcement", _CAPTION, figure)


def _shown(names: list[str]) -> dict[str, tuple[str, str, Line]]:
    """Color, marker and line of each: a variant "of the paper" is dashed, in the color of what it is a variant of."""
    plain = {name: name.removesuffix(", paper") for name in dict.fromkeys(names)}
    colors = styles(plain.values())
    return {name: (*colors[base], "-" if base == name else "--") for name, base in plain.items()}


def _draw(axes: Axes, optimizers: dict[str, Outcomes], shown: dict[str, tuple[str, str, Line]]) -> None:
    for name, own in optimizers.items():
        color, mark, line = shown[name]
        means, bars = [found.mean for found in own.values()], [found.error for found in own.values()]
        axes.errorbar([*own], means, bars, color=color, marker=mark, linestyle=line, markersize=4, linewidth=1.3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda lr, _: power(lr)))
    tidy(axes)
