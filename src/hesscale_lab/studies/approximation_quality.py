"""How close estimates come to the exact diagonal of the Hessian (section 4, figure 1 of Elsayed & Mahmood 2022).

Examples go one at a time through a network. The error of an estimate is its L1 distance from the exact diagonal: summed
over the parameters of a layer, averaged over examples, one number per layer and seed. Networks that are trained are
measured twice, before and after.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale
from hesscale.columns.dial import Rank
from hesscale.estimators import kfac

from ..tasks.networks import Data, Network, Size, seeded, train
from . import stacked_mlp as stacked
from .reading import is_size

REFERENCE = "HesScale"
"""The method whose error is the unit of all relative errors."""

ZERO = "|diag H|"
"""The estimate zero: its error is the L1 norm of the exact diagonal, what one is off by without any estimate."""

AS_CODED = ", as coded"
"""What AdaHessian's estimator is in the authors' experiment: |Hv|; for 50 probes that of the first one, over 50."""

SAMPLES = 50

RANKS: Mapping[str, Rank] = {f"{REFERENCE} rank={rank}": rank for rank in (1, 3, "full")}
"""HesScale with columns, by label."""

STAGES = ("initial", "trained")

Errors = dict[str, list[float]]
"""Mean L1 errors by method, one per layer."""


SEEDS = 99_999
"""Of so many the authors drew theirs."""


def authors_seeds(count: int) -> list[int]:
    """The first of the 40 seeds of the authors' experiment."""
    seeds = random.Random(54321).sample(range(SEEDS), max(count, 40))
    return seeds[:count]


def measure(network: Network, seed: int, *, size: Size, training: Data, testing: Data) -> Iterator[dict[str, Any]]:
    """One record per stage: the errors of all methods, by layer, for the network made from ``seed``."""
    model = seeded(network.make, seed)
    draws = torch.Generator().manual_seed(seed)
    x, y = testing(size.examples, draws)
    for stage, updates in zip(STAGES, (0, size.updates) if size.updates else (0,), strict=False):
        train(model, training, updates=updates, generator=torch.Generator().manual_seed(seed + 1))
        if stacked.is_mlp(model):
            errors = _errors_at_once(cast(nn.Sequential, model), x, y, draws)
        else:
            errors = _errors_one_by_one(model, x, y, draws)
        with torch.no_grad():
            loss = float(F.cross_entropy(model(x), y))
        yield {
            "kind": "quality",
            "seed": seed,
            "stage": stage,
            "layers": layers_of(model),
            "loss": loss,
            "errors": errors,
        }


def layers_of(model: nn.Module) -> list[str]:
    """The names that errors are gathered under, in the order of the parameters."""
    return list(dict.fromkeys(_layer(name) for name, _ in model.named_parameters()))


def _layer(name: str) -> str:
    """The first part of a parameter's name, and the second if it counts: 'blocks.0' of 'blocks.0.linear1.bias'."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if second.isdecimal() else first


def _by_layer(model: nn.Module, distances: Sequence[float]) -> list[float]:
    total = dict.fromkeys(layers_of(model), 0.0)
    for (name, _), distance in zip(model.named_parameters(), distances, strict=True):
        total[_layer(name)] += distance
    return list(total.values())


def _errors_at_once(model: nn.Sequential, x: Tensor, y: Tensor, generator: torch.Generator) -> Errors:
    """All examples in one pass, each with its own copy of the parameters."""
    passed = stacked.stack(model, x, y)
    truth = stacked.exact(passed)
    return {
        method: _by_layer(model, [float((s - t).abs().sum()) / len(x) for s, t in zip(found, truth, strict=True)])
        for method, found in _stacked_estimates(passed, truth, generator)
    }


def _stacked_estimates(
    passed: stacked.Stack, truth: stacked.Diagonals, generator: torch.Generator
) -> Iterator[tuple[str, stacked.Diagonals]]:
    for label, method in ((REFERENCE, "hesscale"), ("BL89", "bl89"), ("HesScaleGN", "hesscale_gn")):
        yield label, stacked.propagated(passed, method)
    yield ZERO, [torch.zeros_like(t) for t in truth]
    yield "GGN", stacked.exact(passed, gauss_newton=True)
    yield "g²", stacked.squared_gradient(passed)
    for label in ("GGN", "KFAC"):
        for count, found in enumerate(stacked.sampled_gauss_newton(passed, SAMPLES, generator), start=1):
            if count in (1, SAMPLES):
                yield f"{label}-MC{count}", found
    mean = [torch.zeros_like(t) for t in truth]
    for count, (found, sizes) in enumerate(stacked.probed_hessian(passed, SAMPLES, generator), start=1):
        mean = [total.add_(s, alpha=1 / SAMPLES) for total, s in zip(mean, found, strict=True)]
        if count == 1:
            yield "AdaHessian-MC1", found
            yield f"AdaHessian-MC1{AS_CODED}", sizes
            yield f"AdaHessian-MC{SAMPLES}{AS_CODED}", [size / SAMPLES for size in sizes]
    yield f"AdaHessian-MC{SAMPLES}", mean
    for label, rank in RANKS.items():
        yield label, stacked.propagated(passed, "hesscale", rank=rank)


ONE_BY_ONE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    REFERENCE: ("hesscale", {}),
    "BL89": ("bl89", {}),
    "HesScaleGN": ("hesscale_gn", {}),
    "GGN": ("ggn", {}),
    "g²": ("squared_gradient", {}),
    "GGN-MC1": ("ggn_mc", {"samples": 1}),
    f"GGN-MC{SAMPLES}": ("ggn_mc", {"samples": SAMPLES}),
    "KFAC-MC1": ("kfac", {"samples": 1}),
    f"KFAC-MC{SAMPLES}": ("kfac", {"samples": SAMPLES}),
    "AdaHessian-MC1": ("hutchinson", {"samples": 1}),
    f"AdaHessian-MC{SAMPLES}": ("hutchinson", {"samples": SAMPLES}),
    **{label: ("hesscale", {"rank": rank}) for label, rank in RANKS.items()},
}
"""What each label is in the library: a method and its options."""


def _errors_one_by_one(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Errors:
    """One example after the other through ``hesscale.estimate``, which works for any network."""
    rows = {label: row for label, row in ONE_BY_ONE.items() if row[0] != "kfac" or _has_factors(model)}
    names = [name for name, _ in model.named_parameters()]
    distances = {label: [0.0] * len(names) for label in (*rows, ZERO)}
    for i in range(len(x)):
        batch = x[i : i + 1], y[i : i + 1]
        truth = hesscale.estimate("hessian", model, F.cross_entropy, batch)
        found = {
            label: hesscale.estimate(method, model, F.cross_entropy, batch, generator=generator, **options)
            for label, (method, options) in rows.items()
        }
        found[ZERO] = {name: torch.zeros_like(t) for name, t in truth.items()}
        for label, estimate in found.items():
            for place, name in enumerate(names):
                distances[label][place] += float((estimate[name] - truth[name]).abs().sum()) / len(x)
    return {label: _by_layer(model, each) for label, each in distances.items()}


def _has_factors(model: nn.Module) -> bool:
    own = (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return all(isinstance(module, kfac.LAYERS) for module in own)


def is_record(record: Mapping[str, Any]) -> bool:
    """Whether a record of kind "quality" has what summaries and figures need."""
    errors, layers = record["errors"], record["layers"]
    return (
        record["stage"] in STAGES
        and isinstance(record["seed"], int)
        and all(isinstance(layer, str) for layer in layers)
        and all(len(row) == len(layers) and all(map(is_size, row)) for row in errors.values())
        and sum(errors[REFERENCE]) > 0
        and ZERO in errors
    )


@dataclass(frozen=True)
class Summary:
    """One method in a line: its mean error, alone and in units of HesScale's, which is also given seed by seed."""

    method: str
    error: float
    relative: float
    relative_by_seed: tuple[float, ...]
    by_layer: tuple[float, ...]


def summarize(records: Sequence[Mapping[str, Any]], stage: str) -> tuple[Summary, ...]:
    """One line per method, the closest first. Relative errors are ratios to HesScale's (the mean's to its mean).

    Of a seed that was measured twice, the last record counts.
    """
    of_stage = [record for record in records if record["kind"] == "quality" and record["stage"] == stage]
    if len({tuple(record["layers"]) for record in of_stage}) > 1:
        raise ValueError("they are of several networks")
    chosen = list({record["seed"]: record["errors"] for record in of_stage}.values())
    if not chosen:
        return ()
    methods = [method for method in chosen[0] if all(method in errors for errors in chosen)]
    totals = {method: [sum(errors[method]) for errors in chosen] for method in methods}
    unit = totals[REFERENCE]
    lines = [
        Summary(
            method=method,
            error=fmean(by_seed),
            relative=fmean(by_seed) / fmean(unit),
            relative_by_seed=tuple(error / one for error, one in zip(by_seed, unit, strict=True)),
            by_layer=tuple(map(fmean, zip(*(errors[method] for errors in chosen), strict=True))),
        )
        for method, by_seed in totals.items()
    ]
    return tuple(sorted(lines, key=lambda line: line.error))
