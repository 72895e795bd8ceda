"""What sampling buys in the time HesScale takes, with columns and without: how many samples fit, what error they leave.

All methods run through ``hesscale.estimate`` on the same batches, in interleaved rounds, so that a busy moment of the
machine hits all of them. Sampled methods are timed with several numbers of samples; how many fit in the time of
HesScale at each of its ranks is read off the line between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale

from ..tasks.networks import BATCH, Data, Network, Size, seeded, train
from . import stacked_mlp as stacked
from .approximation_quality import RANKS, REFERENCE, STAGES
from .reading import Record, by, is_size

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


def cells_of(records: Iterable[Record]) -> dict[tuple[str, int], list[Record]]:
    """The timed records by stage and batch size, where HesScale, the unit of all others, is among them."""
    cells = by((record for record in records if record["kind"] == "time"), "stage", "batch")
    return {key: cell for key, cell in cells.items() if any(record["method"] == REFERENCE for record in cell)}


def measure(
    network: Network, seed: int, *, size: Size, rounds: int, training: Data, testing: Data
) -> Iterator[dict[str, Any]]:
    """The records of one network, at every stage and for every batch size."""
    model = seeded(network.make, seed)
    for stage, updates in zip(STAGES, (0, size.updates) if size.updates else (0,), strict=False):
        train(model, training, updates=updates, generator=torch.Generator().manual_seed(seed + 1))
        for batch in BATCH_SIZES:
            draws = torch.Generator().manual_seed(seed)
            for record in _of_model(model, testing, batch=batch, rounds=rounds, generator=draws):
                yield {"kind": "time", "stage": stage, **record}


def _of_model(
    model: nn.Module, data: Data, *, batch: int, rounds: int, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
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
    model: nn.Module, data: Data, batch: int, rows: Sequence[tuple[str, int]], generator: torch.Generator
) -> dict[tuple[str, int], float]:
    """Mean L1 errors over batches, of each row, of the exact Gauss-Newton diagonal and of zero."""
    found: dict[tuple[str, int], list[float]] = {key: [] for key in (*rows, *((label, 0) for label in BOUNDS))}
    for _ in range(_BATCHES):
        x, y = data(batch, generator)
        truth, ggn = exact(model, x, y, "hessian"), exact(model, x, y, "ggn")
        found["GGN", 0].append(float((ggn - truth).abs().sum()))
        found["|diag H|", 0].append(float(truth.abs().sum()))
        for label, count in rows:
            estimate = _estimate(label, count, model, (x, y), generator)
            found[label, count].append(float((flat(estimate) - truth).abs().sum()))
    return {key: fmean(each) for key, each in found.items()}


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


def flat(found: Mapping[str, Tensor]) -> Tensor:
    """All entries in one vector."""
    return torch.cat([s.reshape(-1) for s in found.values()])
