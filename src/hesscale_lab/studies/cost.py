"""What a step costs: seconds of every optimizer relative to Adam's, cell by cell, and how they grow with the network.

``cost_steps`` has the optimizers, ``cost_timing`` the measurements, ``tasks.cost_networks`` the cells.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, linear_regression
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from ..figures import Color, Plot, label_log, tidy, verbatim
from ..tasks import cost_networks
from ..wording import Table, counted
from . import cost_steps
from .cost_steps import HARDEST, UNIT, Method
from .cost_timing import WAYS, DisturbanceMeter, measure_memory, measure_time
from .study import Cell, Config, Record, Records, Study, by, has, is_size, is_word

PARTS = {
    "headline": lambda cell: cell.headline,
    "panels": lambda cell: cell.panel in ("layers", "outputs"),
    "networks": lambda cell: cell.panel == "networks",
    "memory": lambda cell: cell.panel == "memory",
    "all": lambda cell: True,
}
"""What --only chooses: which cells belong to a part."""


def config_of(
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    compiled: bool = False,
    rounds: int | None = None,
    threads: int = 1,
    asked: Sequence[str] = ("all",),
) -> Config:
    """The content of config.json. ``names``: of the optimizers to measure beside Adam; without any, all of them."""
    rounds = rounds or (5 if quick else 15)
    methods = cost_steps.COMPILED if compiled else cost_steps.installed()
    options = (" --quick" if quick else "") + "".join(f' --optimizer "{name}"' for name in names)
    command = f"hesscale cost --rounds {rounds} --threads {threads}{options}" + (" --compiled" if compiled else "")
    parts = ["all"] if "all" in asked else asked
    return {
        "command": " && ".join(command if part == "all" else f"{command} --only {part}" for part in parts),
        "title": "cost of a step",
        "asked": [*asked],
        "optimizers": [m.name for m in methods if not names or m.name in (UNIT, HARDEST, *names)],
        "compiled": compiled,
        "quick": quick,
        "rounds": rounds,
        "threads": threads,
    }


def _cells_by_key(config: Config) -> dict[Cell, cost_networks.Workload]:
    every = cost_networks.COMPILED if config["compiled"] else (*cost_networks.CELLS, *cost_networks.WEIGHED)
    chosen = [c for c in every if (c.quick or not config["quick"]) and any(PARTS[part](c) for part in config["asked"])]
    chosen.sort(key=lambda cell: not cell.headline)
    return {("memory" if cell.panel == "memory" else "time", cell.name): cell for cell in chosen}


def cells(config: Config) -> list[Cell]:
    """What is measured, and where; the cells of the headline first."""
    return [*_cells_by_key(config)]


def measure(cell: Cell, config: Config, *, data: Path | None, folder: Path) -> Iterable[Record]:
    """One record for each optimizer that fits the cell."""
    chosen = _cells_by_key(config)[cell]
    table: Sequence[Method] = cost_steps.COMPILED if config["compiled"] else cost_steps.METHODS
    methods = [method for method in table if method.name in config["optimizers"]]
    if chosen.panel == "memory":
        return measure_memory(chosen, methods)
    return measure_time(chosen, methods, rounds=config["rounds"], meter=_meter())


@functools.cache
def _meter() -> DisturbanceMeter:
    return DisturbanceMeter()


def calmness(records: Iterable[Record]) -> str:
    """How many rounds there were, and how many of them were disturbed."""
    rows = {record["cell"]: record for record in of_kind(records, "time", optimizer=UNIT)}.values()
    rounds, repeated, kept = (sum(row[key] for row in rows) for key in ("rounds", "repeated", "disturbed"))
    return (
        f"{counted(rounds, 'round')}; {repeated} disturbed ones were repeated, {kept} were kept for want of calm ones"
    )


def of_kind(records: Iterable[Record], kind: str, **fields: Any) -> list[Record]:
    """The records of a kind whose fields have these values."""
    return [
        record
        for record in records
        if record["kind"] == kind and all(record[key] == value for key, value in fields.items())
    ]


def by_optimizer(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records grouped by optimizer, in the order of the table."""
    return by(records, "optimizer")


def headline(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The measured cells of the headline, by optimizer; exact diagonals are left out."""
    return by_optimizer(of_kind(records, "time", headline=True, exact=False))


def growth(records: Iterable[Record]) -> dict[tuple[str, int], tuple[float, float | None]]:
    """The exponent a of seconds ∝ parameters^a, by optimizer and batch size: of all numbers of layers, and of the
    larger half of four or more. The step of a small network is mostly overhead, so the larger half shows the work.
    """
    exponents = {}
    cells = by(of_kind(records, "time", panel="layers", exact=False), "optimizer", "batch")
    for key, rows in cells.items():
        line = sorted((row["parameters"], row["seconds"]) for row in rows)
        if len({size for size, _ in line}) > 1:
            exponents[key] = _slope(line), _slope(line[len(line) // 2 :]) if len(line) > 3 else None
    return exponents


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """a of the least-squares line  log y = a log x + c."""
    return linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)).slope


PAPER: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "layers": {  # 1, 2, 4 … 128 hidden layers
        "Adam": (1.587, 2.352, 4.177, 7.669, 14.480, 28.104, 54.530, 108.529),
        "SGD": (0.579, 0.898, 1.556, 3.125, 6.073, 11.681, 22.342, 44.357),
        "AdaBL89": (3.255, 5.002, 8.615, 15.656, 29.674, 57.443, 113.401, 225.323),
        "AdaHessian": (4.650, 7.639, 13.756, 26.201, 50.762, 98.761, 197.003, 394.857),
        "AdaGGNMC": (1.896, 3.000, 5.112, 9.251, 17.505, 33.244, 66.847, 130.087),
        "AdaHesScaleGN": (2.023, 3.239, 5.498, 10.086, 19.025, 36.045, 71.839, 142.045),
        "AdaHesScale": (3.415, 5.376, 9.339, 17.331, 31.720, 61.485, 121.064, 240.379),
    },
    "outputs": {  # 256, 512 … 8192 outputs of 256 linear units
        "Adam": (0.684, 0.778, 1.075, 1.612, 2.781, 5.198),
        "SGD": (0.264, 0.311, 0.406, 0.593, 1.024, 2.129),
        "AdaBL89": (1.418, 1.533, 1.901, 2.569, 4.161, 7.200),
        "AdaHessian": (1.621, 2.234, 3.350, 5.784, 10.561, 20.766),
        "AdaGGNMC": (0.830, 0.972, 1.289, 1.849, 3.142, 5.611),
        "AdaHesScaleGN": (0.903, 1.071, 1.373, 2.090, 3.520, 6.392),
        "AdaHesScale": (1.442, 1.634, 2.037, 2.853, 4.580, 8.069),
    },
}
"""The authors' own milliseconds, without the forward pass, at batch 1 on an Apple M1: ``data_means.npy`` of
``ex_cost_comp`` and ``ex_cost_comp_single_layer`` in the history of github.com/mohmdelsayed/HesScale."""


def papers_ratio(panel: str, optimizer: str) -> float | None:
    """The mean of the authors' ratios to Adam over a panel."""
    times = PAPER[panel].get(optimizer)
    if times is None:
        return None
    return fmean(ours / unit for ours, unit in zip(times, PAPER[panel][UNIT], strict=True))


def tables(config: Config, records: Records) -> Iterator[Table]:
    """The headline, both panels, growth, single networks and memory, as far as they were measured."""
    layers, batches = (", ".join(map(str, some)) for some in (cost_networks.HEADLINE, cost_networks.BATCHES))
    if best := headline(records):
        yield Table(
            f"Cost of a step relative to {UNIT}'s, geometric means of {counted(max(map(len, best.values())), 'cell')}",
            ("optimizer", *_RATIOS),
            tuple((name, *_ratios(rows)) for name, rows in best.items()),
            f"{layers} layers of {cost_networks.WIDTH} tanh units, batch {batches}. Whole: forward, backward, update, "
            "clearing. No forward: backward and update, as in the paper.",
        )
    yield from _panels(records)
    yield from _growth(records)
    for cell, rows in by(of_kind(records, "time", panel="networks"), "cell").items():
        cells = tuple((row["optimizer"], f"{1000 * row['seconds']:.1f}", *_ratios([row])) for row in rows)
        yield Table(f"Cost of a step relative to {UNIT}'s: {cell}", ("optimizer", "ms", *_RATIOS), cells)
    yield from _memory(records)


_RATIOS = {"whole": "ratio", "no forward": "ratio_without_forward", "whole / fused Adam's": "ratio_to_fused"}


def _ratios(rows: Records) -> list[str]:
    """Geometric means."""
    return [f"{geometric_mean(row[name] for row in rows):.2f}" for name in _RATIOS.values()]


def _panels(records: Records) -> Iterator[Table]:
    """Both panels without the forward pass, beside the paper's own ratios."""
    for panel, title in (("layers", "more and more layers"), ("outputs", "one layer, more and more outputs")):
        measured = of_kind(records, "time", panel=panel, exact=False)
        batches = sorted({record["batch"] for record in measured})
        lines = []
        for name, own in by_optimizer(measured).items():
            cells = by(own, "batch").items()
            ratios = {b: geometric_mean(cell["ratio_without_forward"] for cell in some) for b, some in cells}
            shown = (papers_ratio(panel, name), *(ratios.get(batch) for batch in batches))
            lines.append((name, *("" if ratio is None else f"{ratio:.2f}" for ratio in shown)))
        if lines:
            headings = ("optimizer", "paper", *(f"batch {batch}" for batch in batches))
            yield Table(f"Backward and update relative to {UNIT}'s: {title}", headings, tuple(lines))


def _growth(records: Records) -> Iterator[Table]:
    exponents = growth(records)
    batches = sorted({batch for _, batch in exponents})
    texts = {key: f"{a:.2f}" + ("" if b is None else f" ({b:.2f})") for key, (a, b) in exponents.items()}
    if exponents:
        names = dict.fromkeys(name for name, _ in exponents)
        yield Table(
            "Growth: the exponent a of seconds ∝ parameters^a, whole step, all layers (larger half)",
            ("optimizer", *(f"batch {batch}" for batch in batches)),
            tuple((name, *(texts.get((name, batch), "") for batch in batches)) for name in names),
            "Small networks are mostly overhead, which does not grow.",
        )


def _memory(records: Records) -> Iterator[Table]:
    measured = of_kind(records, "memory")
    cells = by(measured, "cell")
    peaks = {(r["optimizer"], r["cell"]): f"{r['ratio']:.2f} ({r['peak'] / 2**20:.0f})" for r in measured}
    if cells:
        yield Table(
            f"Peak of memory during a step relative to {UNIT}'s (MiB)",
            ("optimizer", *cells),
            tuple((name, *(peaks.get((name, cell), "") for cell in cells)) for name in by_optimizer(measured)),
            "All tensors: parameters, state, activations, temporaries.",
        )


def rows(records: Records) -> Iterator[Record]:
    """Every record with its single numbers."""
    for record in records:
        yield {name: value for name, value in record.items() if not isinstance(value, list)}


Style = tuple[str, Literal["-", "--", "-.", ":", ""], str]

_STYLES: Mapping[str, Style] = {
    "SGD": (Color.GRAY, "-", "X"),
    "Adam": (Color.BLACK, "-", "P"),
    "Adam fused": (Color.BLACK, ":", "P"),
    "Adam compiled": (Color.BLACK, "--", "P"),
    "AdaHesScale": (Color.BLUE, "-", "o"),
    "AdaHesScale compiled": (Color.BLUE, "--", "o"),
    "AdaHesScale every=10": (Color.BLUE, "-.", "."),
    "AdaHesScale rank=1": (Color.BLUE, "--", "2"),
    "AdaHesScale rank=3": (Color.BLUE, "--", "3"),
    "AdaHesScaleGN": (Color.SKY, "-", "s"),
    "AdaBL89": (Color.PURPLE, "-", "^"),
    "AdaGGNMC": (Color.GREEN, "-", "v"),
    "GGN-MC, BackPACK": (Color.GREEN, "--", "v"),
    "AdaHessian": (Color.VERMILION, "-", "D"),
    "AdaHessian, pytorch_optimizer": (Color.VERMILION, "--", "D"),
    "exact GGN": (Color.GREEN, "", "*"),
    "exact H": (Color.VERMILION, "", "*"),
}
"""Color by kind of curvature, line by implementation: fused dotted, other libraries dashed."""

_OTHER: Style = (Color.BROWN, "-", "h")

_PANELS = {"outputs": "one hidden layer, more and more outputs", "layers": "more and more hidden layers"}

_VIEWS: Mapping[str, tuple[str, str, str]] = {
    "cost": (
        "seconds",
        "Time of a whole step",
        "Milliseconds of a whole step (forward, backward, update, clearing of gradients) against the number of "
        "parameters. Both scales are logarithmic.",
    ),
    "cost-without-forward": (
        "seconds_without_forward",
        "Time of backward and update",
        "Milliseconds of backward and update alone, as the paper counts, against the number of parameters. Both scales "
        "are logarithmic.",
    ),
    "cost-relative": (
        "ratio",
        "Time of a whole step relative to Adam's",
        "The time of a whole step divided by that of torch.optim.Adam in the same round, against the number of "
        "parameters. Exact diagonals are far above and left out.",
    ),
}
"""The field, title and caption of each figure. A ratio has a linear scale, without exact diagonals."""


def figures(config: Config, records: Records) -> Iterator[Plot]:
    """Figure 2 of the paper: seconds against parameters, a row per panel, a column per batch size.

    Once for whole steps, once for backward and update alone, as the paper has it, and once relative to Adam.
    """
    shown = [record for record in of_kind(records, "time") if record["panel"] in _PANELS]
    threads = "one thread" if config["threads"] == 1 else counted(config["threads"], "thread")
    for name, (field, title, caption) in _VIEWS.items():
        measured = [record for record in shown if not (field == "ratio" and record["exact"])]
        if measured:
            yield Plot(name, caption, _figure(measured, field, f"{title}, {threads}"))


def _figure(records: Records, field: str, title: str) -> Figure:
    panels = [panel for panel in _PANELS if of_kind(records, "time", panel=panel)]
    batches = sorted({record["batch"] for record in records})
    size = (3.6 * len(batches) + 2.6, 3.9 * len(panels) + 0.5)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    # exact diagonals, at batch 1 only, would take most of a common scale of seconds
    share: Literal["row", "none"] = "row" if field == "ratio" else "none"
    grid = figure.subplots(len(panels), len(batches), squeeze=False, sharex="row", sharey=share)
    for panel, row in zip(panels, grid, strict=True):
        for batch, axes in zip(batches, row, strict=True):
            _draw_cells(axes, of_kind(records, "time", panel=panel, batch=batch), field)
            axes.set_title(f"{_PANELS[panel]}, batch {batch}", fontsize="small")
        for axes in row:  # when the whole row is drawn: an earlier limit would cut off later lines
            _scale(axes, linear=field == "ratio")
        row[0].set_ylabel("time / Adam's" if field == "ratio" else "milliseconds per step")
    for axes in grid[-1]:
        axes.set_xlabel("parameters")
    names = by_optimizer(records)
    lines = [
        Line2D([], [], color=color, linestyle=line, marker=marker, markersize=5, label=verbatim(name))
        for name in (*(name for name in _STYLES if name in names), *(name for name in names if name not in _STYLES))
        for color, line, marker in [_STYLES.get(name, _OTHER)]
    ]
    figure.legend(handles=lines, loc="outside right center", frameon=False, fontsize="small")
    figure.suptitle(title)
    return figure


def _draw_cells(axes: Axes, records: Records, field: str) -> None:
    for name, own in by_optimizer(records).items():
        color, line, marker = _STYLES.get(name, _OTHER)
        points = sorted((record["parameters"], (1 if field == "ratio" else 1000) * record[field]) for record in own)
        axes.plot(*zip(*points, strict=True), color=color, linestyle=line, marker=marker, markersize=4, linewidth=1.3)
    tidy(axes)


def _scale(axes: Axes, *, linear: bool) -> None:
    axes.set_xscale("log")
    label_log(axes.xaxis, formatter=FuncFormatter(_short), short=100)
    if linear:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        label_log(axes.yaxis, formatter=FuncFormatter(_short), short=100)


def _short(value: float, position: int) -> str:
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def _is_positive(value: object) -> bool:
    return is_size(value) and value != 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


_POSITIVE = (
    "batch",
    "parameters",
    "rounds",
    *(f"{n}{w}" for n in ("seconds", "ratio", "ratio_to_fused") for w in WAYS),
)
STUDY = Study(
    "what a step of every optimizer costs relative to Adam's",
    lambda quick: config_of(quick=quick),
    cells,
    ("kind", "cell"),
    measure,
    {
        "time": has(
            **dict.fromkeys(("panel", "cell", "optimizer"), is_word),
            **dict.fromkeys(("headline", "exact"), _is_flag),
            **dict.fromkeys(_POSITIVE, _is_positive),
            **dict.fromkeys(("repeated", "disturbed"), is_size),
        ),
        "memory": has(cell=is_word, optimizer=is_word, peak=_is_positive, ratio=_is_positive),
    },
    tables,
    rows,
    figures,
)
