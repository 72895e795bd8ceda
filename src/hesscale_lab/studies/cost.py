"""What a step costs: seconds of every optimizer relative to Adam's, cell by cell, and how they grow with the network.

A step is forward, backward with curvature, update and clearing of gradients. Counted a second time are backward and
update alone, as in the paper. Optimizers take turns in interleaved rounds in one process, each on a network of its own;
a ratio is the median over rounds of the ratio to Adam in the same round.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, linear_regression, median, quantiles
from typing import Any

from ..tasks.cost_networks import Cell
from .optimizer_steps import HARDEST, UNIT, Method, Step, known_warnings
from .reading import Checks, Record, by, is_size
from .rounds import Rounds, Times, Watch, interleaved

WAYS = ("", "_without_forward")
"""Endings of the fields for the two ways to count."""

_PIECE, _MOST = 0.04, 50  # a piece is about so many seconds of Adam's steps, and at most so many steps
_WARM_UP = 3
_EXACT_ROUNDS = 3  # exact diagonals take seconds and need no precision

_POSITIVE = (
    "batch",
    "parameters",
    "rounds",
    *(f"{n}{w}" for n in ("seconds", "ratio", "ratio_to_fused") for w in WAYS),
)


def _is_time(record: Record) -> bool:
    words, flags = ("panel", "cell", "optimizer"), ("headline", "exact")
    return (
        all(isinstance(record[name], str) for name in words)
        and all(isinstance(record[name], bool) for name in flags)
        and all(is_size(record[name]) and record[name] > 0 for name in _POSITIVE)
        and all(is_size(record[name]) for name in ("repeated", "disturbed"))
    )


def _is_memory(record: Record) -> bool:
    words, sizes = (record["cell"], record["optimizer"]), (record["peak"], record["ratio"])
    return all(isinstance(word, str) for word in words) and all(is_size(size) and size > 0 for size in sizes)


CHECKS: Checks = {"time": _is_time, "memory": _is_memory}


def measure(cell: Cell, methods: Sequence[Method], *, rounds: int, watch: Watch) -> list[dict[str, Any]]:
    """One record per method that fits the cell."""
    problem = cell.problem()
    fitting = [method for method in methods if method.fits(problem)]
    optimizers = [method for method in fitting if not method.exact]
    exact = [method for method in fitting if method.exact]
    units = [method for method in optimizers if method.name in (UNIT, HARDEST)]
    common = {"kind": "time", "panel": cell.panel, "cell": cell.name, "title": cell.title, "batch": cell.batch}
    common |= {"parameters": problem.parameters, "headline": cell.headline}
    records = _measure_some(cell, optimizers, rounds=rounds, watch=watch)
    if exact:
        found = _measure_some(cell, [*units, *exact], rounds=min(rounds, _EXACT_ROUNDS), watch=watch)
        records += [record for record in found if record["exact"]]
    return [{**common, **record} for record in records]


def _measure_some(cell: Cell, methods: Sequence[Method], *, rounds: int, watch: Watch) -> list[dict[str, Any]]:
    with known_warnings():
        steps = {method.name: method.step(cell.problem()) for method in methods}
        for method in methods:
            # the first period of ``every`` computes curvature in each step; only then its cheap steps begin
            for _ in range(1 if method.exact else max(_WARM_UP, 2 * method.period)):
                steps[method.name]()
        shortest = min(timed(steps[UNIT], 1)[0] for _ in range(_WARM_UP))
        warm = not any(method.exact for method in methods)
        count = min(_MOST, math.ceil(_PIECE / shortest)) if warm else 1
        # whole periods only, so that every piece has its share of cheap and of dear steps
        counts = {method.name: method.period * math.ceil(count / method.period) for method in methods}
        pieces = {name: functools.partial(timed, step, counts[name], warm=warm) for name, step in steps.items()}
        found = interleaved(pieces, rounds=rounds, watch=watch)
    return [
        {"optimizer": method.name, "exact": method.exact, "steps": counts[method.name], **_summary(found, method.name)}
        for method in methods
    ]


def timed(step: Step, count: int, *, warm: bool = True) -> Times:
    """Seconds per step: of all of it, and of backward and update alone.

    One more comes before: in training, a step finds in the caches what the last one left there.
    """
    clock = time.perf_counter
    whole = part = 0.0
    if warm:
        step()
    for _ in range(count):
        start = clock()
        loss = step.forward()
        middle = clock()
        step.backward(loss)
        step.update()
        updated = clock()
        step.clear()
        end = clock()
        whole, part = whole + end - start, part + updated - middle
    return whole / count, part / count


def _summary(found: Rounds, name: str) -> dict[str, Any]:
    """Median seconds, median ratios to Adam and to fused Adam in the same round, quartiles of the former."""
    record: dict[str, Any] = {"rounds": len(found.times), "repeated": found.repeated, "disturbed": found.disturbed}
    for way, ending in enumerate(WAYS):
        seconds = [times[name][way] for times in found.times]
        ratios = [times[name][way] / times[UNIT][way] for times in found.times]
        record[f"seconds{ending}"] = median(seconds)
        record[f"ratio{ending}"] = median(ratios)
        record[f"quartiles{ending}"] = quantiles(ratios, n=4)[::2] if len(ratios) > 1 else 2 * ratios
        record[f"ratio_to_fused{ending}"] = median(t[name][way] / t[HARDEST][way] for t in found.times)
    return record


def of_kind(records: Iterable[Record], kind: str, **fields: Any) -> list[Record]:
    """The records of a kind whose fields have these values."""
    return [
        record
        for record in records
        if record["kind"] == kind and all(record[key] == value for key, value in fields.items())
    ]


@dataclass(frozen=True)
class Mean:
    """An optimizer's geometric means over cells."""

    optimizer: str
    ratio: float
    ratio_without_forward: float
    ratio_to_fused: float
    cells: int


def headline(records: Iterable[Record]) -> list[Mean]:
    """Geometric means over the cells of the headline that were measured; exact diagonals are not part of it."""
    chosen = of_kind(records, "time", headline=True, exact=False)
    return [
        Mean(
            name,
            ratio=geometric_mean(row["ratio"] for row in rows),
            ratio_without_forward=geometric_mean(row["ratio_without_forward"] for row in rows),
            ratio_to_fused=geometric_mean(row["ratio_to_fused"] for row in rows),
            cells=len(rows),
        )
        for name, rows in by_optimizer(chosen).items()
    ]


def by_optimizer(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records in the order of the table, under the name of their optimizer."""
    return by(records, "optimizer")


@dataclass(frozen=True)
class Growth:
    """The exponent a of seconds ∝ parameters^a over all cells of a line, and over the larger half of four or more."""

    optimizer: str
    batch: int
    exponent: float
    of_larger_half: float | None


def growth(records: Iterable[Record]) -> list[Growth]:
    """The growth of the whole step with the number of layers, per optimizer and batch size.

    A small network's step is mostly overhead that does not grow, so that all cells together give less than 1 even
    where the work is linear; the larger half of them shows the work.
    """
    grown = []
    for name, rows in by_optimizer(of_kind(records, "time", panel="layers", exact=False)).items():
        for batch in sorted({row["batch"] for row in rows}):
            line = sorted((row["parameters"], row["seconds"]) for row in rows if row["batch"] == batch)
            if len({size for size, _ in line}) > 1:
                larger = exponent(line[len(line) // 2 :]) if len(line) > 3 else None
                grown.append(Growth(name, batch, exponent(line), larger))
    return grown


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """a of the least-squares line  log y = a log x + c."""
    return linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)).slope


def ratio_of(records: Iterable[Record], optimizer: str, batch: int, panel: str) -> float | None:
    """The geometric mean of an optimizer's ratios over a panel at one batch size, without the forward pass."""
    rows = of_kind(records, "time", optimizer=optimizer, batch=batch, panel=panel)
    return geometric_mean(row["ratio_without_forward"] for row in rows) if rows else None


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
