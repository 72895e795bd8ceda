"""What sampled estimates reach in the time that HesScale takes, with columns and without.

All methods run through ``hesscale.estimate`` on the same batches, in interleaved rounds, so that a busy moment of the
machine hits all of them. Sampled methods are timed with several numbers of samples; how many fit in the time of
HesScale at each of its ranks follows by interpolation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, cast

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale
from hesscale.columns.dial import Rank

from ..figures import Color, Plot, label_log, tidy, verbatim
from ..tasks.networks import BATCH, Draw
from ..wording import Table
from . import stacked_mlp as stacked
from .study import REFERENCE, STAGES, Config, Record, Records, by, is_size

RANKS: Mapping[str, Rank] = {f"{REFERENCE} rank={rank}": rank for rank in (1, 3, "full")}
"""HesScale with columns, by label."""

SAMPLED: Mapping[str, str] = {"AdaHessian-MC": "hutchinson", "GGN-MC": "ggn_mc"}
SINGLE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    REFERENCE: ("hesscale", {}),
    "HesScaleGN": ("hesscale_gn", {}),
    "g²": ("squared_gradient", {}),
    **{label: ("hesscale", {"rank": rank}) for label, rank in RANKS.items()},
}
BATCH_SIZES = (1, BATCH)
BOUNDS = ("GGN", "|diag H|")
"""Errors to compare with: of the exact Gauss-Newton diagonal, which GGN-MC tends to, and of zero."""

_LADDER = (1, 4, 16, 64)  # numbers of samples that are timed
_MOST = 200  # samples that are considered at all
_BATCHES = 10  # over which errors are averaged


def is_record(record: Record) -> bool:
    """Whether a record of kind "time" has what tables and figures need; only bounds have no time."""
    seconds, samples, method = record["seconds"], record["samples"], record["method"]
    return (
        record["stage"] in STAGES
        and isinstance(record["batch"], int)
        and isinstance(method, str)
        and (seconds is None if method in BOUNDS else is_size(seconds) and seconds > 0)
        and (samples is None or isinstance(samples, int))
        and is_size(record["error"])
        and (record["error"] > 0 or method != REFERENCE)  # the unit of the others
    )


def cells_of(records: Records) -> dict[tuple[str, int], list[Record]]:
    """The timed records by stage and batch size; without HesScale, the unit of all others, a group is left out."""
    cells = by((record for record in records if record["kind"] == "time"), "stage", "batch")
    return {key: cell for key, cell in cells.items() if any(record["method"] == REFERENCE for record in cell)}


def measure(model: nn.Module, data: Draw, *, stage: str, rounds: int, seed: int) -> Iterator[Record]:
    """The records of a model, for every batch size."""
    for batch in BATCH_SIZES:
        generator = torch.Generator().manual_seed(seed)
        for record in _of_batch_size(model, data, batch=batch, rounds=rounds, generator=generator):
            yield {"kind": "time", "stage": stage, **record}


def _of_batch_size(
    model: nn.Module, data: Draw, *, batch: int, rounds: int, generator: torch.Generator
) -> Iterator[Record]:
    """One record per method: the time of an estimate, the samples in it, its mean L1 error over some batches."""
    seconds = _timed(model, data(batch, generator), rounds, generator)
    budgets = [seconds[label, 1] for label in (REFERENCE, *RANKS)]
    rows = [(label, 1) for label in SINGLE]
    for label in SAMPLED:
        counts = {*_LADDER, *(affordable(seconds, label, budget) for budget in budgets)}
        rows += [(label, count) for count in sorted(counts)]
    errors = _errors(model, data, batch, rows, generator)
    for label, count in rows:
        yield {
            "batch": batch,
            "method": label,
            "samples": count if label in SAMPLED else None,
            "seconds": time_of(seconds, label, count) if label in SAMPLED else seconds[label, 1],
            "error": errors[label, count],
        }
    for label in BOUNDS:
        yield {"batch": batch, "method": label, "samples": None, "seconds": None, "error": errors[label, 0]}


def time_of(seconds: Mapping[tuple[str, int], float], label: str, count: int) -> float:
    """Seconds for ``count`` samples, between and beyond the numbers that were timed along straight lines."""
    lower = max(step for step in _LADDER[:-1] if step <= count)
    upper = _LADDER[_LADDER.index(lower) + 1]
    slope = max(0.0, seconds[label, upper] - seconds[label, lower]) / (upper - lower)  # less can only be noise
    return seconds[label, lower] + slope * (count - lower)


def affordable(seconds: Mapping[tuple[str, int], float], label: str, budget: float) -> int:
    """How many samples fit in ``budget`` seconds; 1 if not even one does."""
    return max((count for count in range(1, _MOST) if time_of(seconds, label, count) <= budget), default=1)


def _timed(
    model: nn.Module, batch: tuple[Tensor, Tensor], rounds: int, generator: torch.Generator
) -> dict[tuple[str, int], float]:
    """Median seconds by label and samples."""

    def call(label: str, count: int) -> Callable[[], Any]:
        return lambda: _estimate(label, count, model, batch, generator)

    keys = [*((label, 1) for label in SINGLE), *((label, count) for label in SAMPLED for count in _LADDER)]
    calls = {key: call(*key) for key in keys}
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for number in range(rounds + 1):
        for key, run in calls.items():
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                taken[key].append(time.perf_counter() - start)
    return {key: median(each) for key, each in taken.items()}


def _errors(
    model: nn.Module, data: Draw, batch: int, rows: Sequence[tuple[str, int]], generator: torch.Generator
) -> dict[tuple[str, int], float]:
    """Mean L1 errors over batches, of each row, of the exact Gauss-Newton diagonal and of zero."""
    errors: dict[tuple[str, int], list[float]] = {key: [] for key in (*rows, *((label, 0) for label in BOUNDS))}
    for _ in range(_BATCHES):
        x, y = data(batch, generator)
        truth, ggn = exact(model, x, y, "hessian"), exact(model, x, y, "ggn")
        errors["GGN", 0].append(float((ggn - truth).abs().sum()))
        errors["|diag H|", 0].append(float(truth.abs().sum()))
        for label, count in rows:
            estimate = _estimate(label, count, model, (x, y), generator)
            errors[label, count].append(float((flat(estimate) - truth).abs().sum()))
    return {key: fmean(each) for key, each in errors.items()}


def _estimate(
    label: str, count: int, model: nn.Module, batch: tuple[Tensor, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    method, options = (SAMPLED[label], {"samples": count}) if label in SAMPLED else SINGLE[label]
    return hesscale.estimate(method, model, F.cross_entropy, batch, generator=generator, **options)


def exact(model: nn.Module, x: Tensor, y: Tensor, method: str) -> Tensor:
    """The exact diagonal of the batch's mean loss, in one vector."""
    if not stacked.is_mlp(model):
        return flat(hesscale.estimate(method, model, F.cross_entropy, (x, y)))
    passed = stacked.stack(cast(nn.Sequential, model), x, y)
    return torch.cat([s.mean(0).reshape(-1) for s in stacked.exact(passed, gauss_newton=method == "ggn")])


def flat(diagonal: Mapping[str, Tensor]) -> Tensor:
    """All entries in one vector."""
    return torch.cat([s.reshape(-1) for s in diagonal.values()])


def tables(config: Config, records: Records) -> Iterator[Table]:
    """The error that sampling reaches with some samples, and with as many as fit in the time that HesScale takes."""
    for (stage, batch), cell in cells_of(records).items():
        unit = next(record for record in cell if record["method"] == REFERENCE)
        yield Table(
            f"Error per unit of time: {config['title']}, {stage}, batch {batch}",
            ("method", "samples", "ms", "relative time", "relative error"),
            tuple(_row(record, unit) for record in cell),
        )


def _row(record: Record, unit: Record) -> tuple[str, ...]:
    seconds, error = record["seconds"], f"{record['error'] / unit['error']:.2f}"
    if seconds is None:
        return record["method"], "exact" if record["method"] == "GGN" else "", "", "", error
    samples, relative = str(record["samples"] or ""), f"{seconds / unit['seconds']:.2f}"
    return record["method"], samples, f"{1000 * seconds:.2f}", relative, error


_STYLES = {
    "HesScale": (Color.BLUE, "D"),
    "HesScale rank=1": (Color.BLUE, "o"),
    "HesScale rank=3": (Color.BLUE, "^"),
    "HesScale rank=full": (Color.BLUE, "*"),
    "HesScaleGN": (Color.SKY, "D"),
    "g²": ("#777777", "s"),
    "AdaHessian-MC": (Color.VERMILION, "o-"),
    "GGN-MC": (Color.GREEN, "o-"),
}
_BOUNDS = {"GGN": (":", "GGN, exact"), "|diag H|": ("--", "|diag H| (estimate 0)")}
_ROUNDING = 1e-10  # an error below this share of HesScale's is rounding, and has no place on a log axis

_CAPTION = (
    "Error of every estimate, in units of HesScale's, against the milliseconds it takes (gray line: HesScale's), on "
    "logarithmic scales. Sampled estimates are lines over the number of samples. Hollow, at the foot: exact."
)


def figures(config: Config, records: Records) -> Iterator[Plot]:
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
    yield Plot("time", _CAPTION, figure)


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
        label_log(axis)
