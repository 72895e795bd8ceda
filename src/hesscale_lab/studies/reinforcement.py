"""How returns depend on the step size: A2C and PPO with Adam, Adam in a trust region, AdaHesScale and AdaHesScaleGN.

All optimizers get the same networks, step sizes and seeds. Returns of CartPole, Acrobot and Pendulum are put on one
scale: the gain is 0 for actions at random, 1 for a problem that counts as solved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

import hesscale
from hesscale.applications.step_size import TrustRegion

from ..figures import Plot, styles, tidy, verbatim
from ..reinforcement.environments import ENVIRONMENTS
from ..reinforcement.training import ALGORITHMS, WINDOWS, Method, Runs, curves
from ..wording import Table, power
from .study import Cell, Config, Record, Records, Study, by, has, is_number, is_size, is_whole, is_word

STEPS = 40 * 1024
RATES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
SEEDS = 10
TOGETHER = 5
"""How many seeds are trained at once."""
DELTA = 1e-4
"""The size of the trust region: the default of the code that came with the paper's follow-up."""
COLLAPSE = 0.5
"""A run has collapsed if it ends below this share of its own best gain."""


def _adam(params: Any, lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=lr, fused=True)


METHODS: Mapping[str, Method] = {
    "Adam": Method(_adam),
    "AdaHesScale": Method(lambda params, lr: hesscale.AdaHesScale(params, lr=lr), "hesscale"),
    "AdaHesScaleGN": Method(lambda params, lr: hesscale.AdaHesScaleGN(params, lr=lr), "hesscale_gn"),
    "AdaHesScale, paper": Method(lambda params, lr: hesscale.AdaHesScale(params, lr=lr, bound=None), "hesscale"),
    "AdaHesScaleGN, paper": Method(lambda params, lr: hesscale.AdaHesScaleGN(params, lr=lr, bound=None), "hesscale_gn"),
    "Adam, trust region": Method(lambda params, lr: TrustRegion(_adam(params, lr), DELTA), "hesscale", by_entry=False),
}


def settings(quick: bool) -> Config:
    """The content of config.json; quick: CartPole alone, three step sizes, five seeds, a sixth of the steps."""
    return {
        "environments": ["CartPole"] if quick else [*ENVIRONMENTS],
        "algorithms": [*ALGORITHMS],
        "optimizers": [*METHODS],
        "delta": DELTA,
        "rates": [1e-3, 1e-2, 1e-1] if quick else [*RATES],
        "seeds": TOGETHER if quick else SEEDS,
        "steps": STEPS // 6 if quick else STEPS,
    }


def cells(config: Config) -> list[Cell]:
    """Environment, algorithm, optimizer and first seed; all with the first seeds before any with the next ones."""
    return [
        (environment, algorithm, optimizer, first)
        for first in range(0, config["seeds"], TOGETHER)
        for environment in config["environments"]
        for optimizer in config["optimizers"]
        for algorithm in config["algorithms"]
    ]


def measure(cell: Cell, config: Config, *, data: Path | None, folder: Path) -> Iterator[Record]:
    """A record for each step size and seed. The curve is None where no episode ended."""
    environment, algorithm, optimizer, first = cell
    runs = Runs(
        ENVIRONMENTS[environment],
        ALGORITHMS[algorithm],
        METHODS[optimizer],
        rates=config["rates"],
        seeds=range(first, min(first + TOGETHER, config["seeds"])),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimizers warn of large steps, which are counted here
        measured = curves(runs, config["steps"])
    for (lr, seed), curve, alive in zip(runs.settings, measured, runs.alive, strict=True):
        shown = [None if value is None else float(f"{value:.6g}") for value in curve]
        where = {"environment": environment, "algorithm": algorithm, "optimizer": optimizer, "first": first}
        yield {"kind": "reinforcement", **where, "lr": lr, "seed": seed, "finite": alive, "curve": shown}


def gains(record: Record) -> list[float]:
    """The curve on a scale from 0 (actions at random) to 1 (solved); where no episode ended, the value before."""
    environment, values = ENVIRONMENTS[record["environment"]], [0.0]
    for value in record["curve"]:
        gain = values[-1] if value is None else (value - environment.random) / (environment.solved - environment.random)
        values.append(gain)
    return values[1:]


@dataclass(frozen=True)
class Outcome:
    """The runs with one step size: the return in their last tenth, and the share that collapsed."""

    runs: int
    mean: float  # return
    error: float  # its standard error over seeds
    gain: float  # on the scale of all environments
    collapsed: float
    broken: float  # not finite


def outcome(records: Records) -> Outcome:
    """The outcome of some runs. A run that became not finite has collapsed, and counts with its last gain."""
    environment = ENVIRONMENTS[records[0]["environment"]]
    curves_ = [gains(record) for record in records]
    finals = torch.tensor([curve[-1] for curve in curves_], dtype=torch.float64)
    fell = [
        not record["finite"] or (max(curve) > 0.1 and curve[-1] < COLLAPSE * max(curve))
        for record, curve in zip(records, curves_, strict=True)
    ]
    width = environment.solved - environment.random
    spread = float(finals.std()) / len(finals) ** 0.5 if len(finals) > 1 else 0.0
    gain = float(finals.mean())
    return Outcome(
        len(records),
        environment.random + width * gain,
        width * spread,
        gain,
        sum(fell) / len(fell),
        sum(not record["finite"] for record in records) / len(records),
    )


Outcomes = Mapping[float, Outcome]
"""Outcomes by step size."""


def by_problem(records: Records) -> dict[tuple[str, str], dict[str, Outcomes]]:
    """Outcomes by environment and algorithm, then by optimizer, then by step size."""
    return {
        problem: {
            name: {lr: outcome(cell) for lr, cell in sorted(by(rates, "lr").items())}
            for name, rates in by(some, "optimizer").items()
        }
        for problem, some in by(records, "environment", "algorithm").items()
    }


def tables(config: Config, records: Records) -> Iterator[Table]:
    """For each problem the best of each optimizer and its width, then all step sizes."""
    for (environment, algorithm), optimizers in by_problem(records).items():
        outcomes = [one for rates in optimizers.values() for one in rates.values()]
        runs, top = max(one.runs for one in outcomes), max(one.gain for one in outcomes)
        yield Table(
            f"{environment}, {algorithm}: returns at the end of {config['steps']} steps, {runs} seeds",
            ("optimizer", "best return", "± s.e.", "at lr", "wide", "mean gain", "collapsed %", "not finite %"),
            tuple((name, *_summary(rates, top)) for name, rates in optimizers.items()),
            "Wide: step sizes within 20 % of the best gain of all. Gain: 0 at random, 1 solved, mean over step sizes. "
            "Collapsed: not finite, or below half of the run's own best gain.",
        )
        tried = sorted({lr for rates in optimizers.values() for lr in rates})
        yield Table(
            f"{environment}, {algorithm}: mean return by step size (collapsed %)",
            ("optimizer", *(f"{lr:g}" for lr in tried)),
            tuple((name, *(_cell(rates.get(lr)) for lr in tried)) for name, rates in optimizers.items()),
        )


def _summary(rates: Outcomes, top: float) -> tuple[str, ...]:
    best = max(rates, key=lambda lr: rates[lr].gain)
    wide = sum(one.gain >= 0.8 * top for one in rates.values())
    keys = ("gain", "collapsed", "broken")
    gain, collapsed, broken = (sum(getattr(one, key) for one in rates.values()) / len(rates) for key in keys)
    return (
        f"{rates[best].mean:.0f}",
        f"{rates[best].error:.0f}",
        f"{best:g}",
        f"{wide} of {len(rates)}",
        f"{gain:.2f}",
        f"{100 * collapsed:.0f}",
        f"{100 * broken:.0f}",
    )


def _cell(one: Outcome | None) -> str:
    return "" if one is None else f"{one.mean:.0f} ({100 * one.collapsed:.0f})"


def rows(records: Records) -> Iterator[Record]:
    """Outcomes by environment, algorithm, optimizer and step size."""
    for (environment, algorithm), optimizers in by_problem(records).items():
        for name, rates in optimizers.items():
            for lr, one in rates.items():
                yield {
                    "environment": environment,
                    "algorithm": algorithm,
                    "optimizer": name,
                    "lr": lr,
                    "runs": one.runs,
                    "return": f"{one.mean:.1f}",
                    "error": f"{one.error:.1f}",
                    "gain": f"{one.gain:.3f}",
                    "collapsed": f"{one.collapsed:.2f}",
                    "not_finite": f"{one.broken:.2f}",
                }


Line = Literal["-", "--"]

_CAPTION = (
    "Mean return at the end of training over the step size, bars of ± one standard error over seeds. Dashed: the "
    "paper's algorithm, without a bound."
)


def figures(config: Config, records: Records) -> Iterator[Plot]:
    """Returns over step sizes: a panel for each environment and algorithm, a line for each optimizer."""
    problems = by_problem(records)
    if not problems:
        return
    environments = [*dict.fromkeys(environment for environment, _ in problems)]
    algorithms = [*dict.fromkeys(algorithm for _, algorithm in problems)]
    size = (3.6 * len(environments) + 0.4, 2.7 * len(algorithms) + 0.9)
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    panels = figure.subplots(len(algorithms), len(environments), squeeze=False, sharex=True)
    shown = _styles([name for optimizers in problems.values() for name in optimizers])
    for row, algorithm in zip(panels, algorithms, strict=True):
        for axes, environment in zip(row, environments, strict=True):
            _draw(axes, problems.get((environment, algorithm), {}), shown)
            axes.set_title(f"{environment}, {algorithm}", fontsize="medium")
        row[0].set_ylabel("return")
    for axes in panels[-1]:
        axes.set_xlabel("lr")
    handles = [
        Line2D([], [], color=color, marker=mark, linestyle=line, markersize=5, label=verbatim(name))
        for name, (color, mark, line) in shown.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    yield Plot("reinforcement", _CAPTION, figure)


def _styles(names: list[str]) -> dict[str, tuple[str, str, Line]]:
    """Color, marker and line of each optimizer; "X, paper" is dashed, in the color of X."""
    bases = {name: name.removesuffix(", paper") for name in dict.fromkeys(names)}
    colors = styles(bases.values())
    return {name: (*colors[base], "-" if base == name else "--") for name, base in bases.items()}


def _draw(axes: Axes, optimizers: dict[str, Outcomes], shown: dict[str, tuple[str, str, Line]]) -> None:
    for name, rates in optimizers.items():
        color, mark, line = shown[name]
        means, bars = [one.mean for one in rates.values()], [one.error for one in rates.values()]
        axes.errorbar([*rates], means, bars, color=color, marker=mark, linestyle=line, markersize=4, linewidth=1.3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda lr, _: power(lr)))
    tidy(axes)


def _is_curve(values: Any) -> bool:
    return len(values) == WINDOWS and all(value is None or is_number(value) for value in values)


STUDY = Study(
    "how returns of A2C and PPO depend on the step size, with and without a trust region (an hour)",
    settings,
    cells,
    ("environment", "algorithm", "optimizer", "first"),
    measure,
    {
        "reinforcement": has(
            environment=lambda name: name in ENVIRONMENTS,
            lr=is_size,
            curve=_is_curve,
            **dict.fromkeys(("algorithm", "optimizer"), is_word),
            **dict.fromkeys(("first", "seed", "finite"), is_whole),
        )
    },
    tables,
    rows,
    figures,
)
