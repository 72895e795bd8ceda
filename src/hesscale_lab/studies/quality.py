"""How close estimates come to the exact diagonal of the Hessian (section 4, figure 1 of Elsayed & Mahmood 2022).

Examples go one at a time through a network. The error of an estimate is its L1 distance from the exact diagonal: the
sum over the parameters of a layer, the mean over examples, one number per layer and seed. A network that is trained is
measured before and after. ``quality_time`` measures what sampled estimates reach in the time that HesScale takes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale
from hesscale.estimators import kfac

from ..figures import Color, Plot, label_log, tidy, verbatim
from ..tasks.networks import NETWORKS, seeded, sources, train
from ..wording import Table, counted
from . import quality_time
from . import stacked_mlp as stacked
from .study import REFERENCE, STAGES, ZERO, Cell, Config, Record, Records, Study, is_size

AS_CODED = ", as coded"
"""AdaHessian's estimator as the authors' experiment has it: |Hv|; for 50 probes that of the first one, over 50."""

SAMPLES = 50

Errors = dict[str, list[float]]
"""Mean L1 errors by method, one per layer."""

SEEDS = 99_999
"""The authors drew their seeds from this many."""


def authors_seeds(count: int) -> list[int]:
    """The first of the 40 seeds of the authors' experiment."""
    seeds = random.Random(54321).sample(range(SEEDS), max(count, 40))
    return seeds[:count]


def config_of(name: str, *, quick: bool, **sizes: int | None) -> Config:
    """The content of config.json for a network; ``sizes`` that are not None replace those of the table."""
    network = NETWORKS[name]
    size = replace(
        network.quick if quick else network.full, **{key: value for key, value in sizes.items() if value is not None}
    )
    options = f"--seeds {size.seeds} --examples {size.examples} --updates {size.updates}"
    return {
        "command": f"hesscale quality --network {name} {options}" + (" --quick" if quick else ""),
        "title": network.title,
        "network": name,
        "seeds": authors_seeds(size.seeds),
        "examples": size.examples,
        "updates": size.updates,
        "rounds": 5 if quick else 30,
    }


def cells(config: Config) -> list[Cell]:
    """Errors seed by seed, then times."""
    return [*(("quality", seed) for seed in config["seeds"]), ("time", None)]


def measure(cell: Cell, config: Config, *, data: Path | None, folder: Path) -> Iterator[Record]:
    """The records of a seed, one per stage of training; or the times, with the first seed."""
    kind, seed = cell
    network, updates = NETWORKS[config["network"]], config["updates"]
    training, testing = sources(network, data)
    seed = config["seeds"][0] if kind == "time" else seed
    model = seeded(network.make, seed)
    draws = torch.Generator().manual_seed(seed)
    x, y = testing(config["examples"], draws)
    for stage, steps in zip(STAGES, (0, updates) if updates else (0,), strict=False):
        train(model, training, updates=steps, generator=torch.Generator().manual_seed(seed + 1))
        if kind == "time":
            yield from quality_time.measure(model, testing, stage=stage, rounds=config["rounds"], seed=seed)
            continue
        if stacked.is_mlp(model):
            errors = _errors_at_once(cast(nn.Sequential, model), x, y, draws)
        else:
            errors = _errors_one_by_one(model, x, y, draws)
        with torch.no_grad():
            loss = float(F.cross_entropy(model(x), y))
        common = {"kind": "quality", "seed": seed, "stage": stage}
        yield {**common, "layers": layers_of(model), "loss": loss, "errors": errors}


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
        method: _by_layer(model, [float((s - t).abs().sum()) / len(x) for s, t in zip(diagonal, truth, strict=True)])
        for method, diagonal in _stacked_estimates(passed, truth, generator)
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
        for count, diagonal in enumerate(stacked.sampled_gauss_newton(passed, SAMPLES, generator), start=1):
            if count in (1, SAMPLES):
                yield f"{label}-MC{count}", diagonal
    mean = [torch.zeros_like(t) for t in truth]
    for count, (product, sizes) in enumerate(stacked.probed_hessian(passed, SAMPLES, generator), start=1):
        mean = [total.add_(s, alpha=1 / SAMPLES) for total, s in zip(mean, product, strict=True)]
        if count == 1:
            yield "AdaHessian-MC1", product
            yield f"AdaHessian-MC1{AS_CODED}", sizes
            yield f"AdaHessian-MC{SAMPLES}{AS_CODED}", [size / SAMPLES for size in sizes]
    yield f"AdaHessian-MC{SAMPLES}", mean
    for label, rank in quality_time.RANKS.items():
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
    **{label: ("hesscale", {"rank": rank}) for label, rank in quality_time.RANKS.items()},
}
"""The library's method and options for each label."""


def _errors_one_by_one(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Errors:
    """One example after the other through ``hesscale.estimate``, which works for any network."""
    rows = {label: row for label, row in ONE_BY_ONE.items() if row[0] != "kfac" or _has_factors(model)}
    names = [name for name, _ in model.named_parameters()]
    distances = {label: [0.0] * len(names) for label in (*rows, ZERO)}
    for i in range(len(x)):
        batch = x[i : i + 1], y[i : i + 1]
        truth = hesscale.estimate("hessian", model, F.cross_entropy, batch)
        estimates = {
            label: hesscale.estimate(method, model, F.cross_entropy, batch, generator=generator, **options)
            for label, (method, options) in rows.items()
        }
        estimates[ZERO] = {name: torch.zeros_like(t) for name, t in truth.items()}
        for label, estimate in estimates.items():
            for number, name in enumerate(names):
                distances[label][number] += float((estimate[name] - truth[name]).abs().sum()) / len(x)
    return {label: _by_layer(model, each) for label, each in distances.items()}


def _has_factors(model: nn.Module) -> bool:
    layers = (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return all(isinstance(layer, kfac.LAYERS) for layer in layers)


@dataclass(frozen=True)
class Summary:
    """The mean error of a method, and its ratio to HesScale's, in the mean and seed by seed."""

    method: str
    error: float
    relative: float
    relative_by_seed: tuple[float, ...]
    by_layer: tuple[float, ...]


def summarize(records: Records, stage: str) -> tuple[Summary, ...]:
    """One summary per method, the closest first. If a seed was measured twice, the last record counts."""
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


def _error_tables(config: Config, records: Records) -> Iterator[Table]:
    """The errors of all estimates, stage by stage."""
    for stage in STAGES:
        lines = summarize(records, stage)
        if not lines:
            continue
        when = "" if not config["updates"] else ", before training" if stage == STAGES[0] else ", after training"
        seeds = counted(len(lines[0].relative_by_seed), "seed")
        yield Table(
            f"L1 distance from the exact Hessian diagonal: {config['title']}{when}, {seeds} × "
            f"{counted(config['examples'], 'example')}",
            ("method", "mean L1 error", "relative", "lowest … highest seed"),
            tuple(
                (
                    line.method,
                    f"{line.error:.4g}",
                    f"{line.relative:.2f}",
                    f"{min(line.relative_by_seed):.2f} … {max(line.relative_by_seed):.2f}",
                )
                for line in lines
            ),
            f"Relative: to {REFERENCE}'s error. {ZERO}: estimate 0. As coded: |Hv| of one probe, over 50 for MC50, as "
            "in the authors' experiment.",
        )


def tables(config: Config, records: Records) -> Iterator[Table]:
    """Errors, and errors per unit of time."""
    return chain(_error_tables(config, records), quality_time.tables(config, records))


def rows(records: Records) -> Iterator[Record]:
    """Mean L1 errors of every estimate, alone and relative to HesScale's."""
    for stage in STAGES:
        for line in summarize(records, stage):
            common = {"stage": stage, "method": line.method, "seeds": len(line.relative_by_seed)}
            yield {**common, "error": line.error, "relative": line.relative}


def figures(config: Config, records: Records) -> Iterator[Plot]:
    """Errors, and errors against time."""
    return chain(_error_figures(config, records), quality_time.figures(config, records))


_GRAY = "#777777"
_FAMILIES = {
    "HesScale": Color.BLUE,
    "BL89": Color.BLUE,
    "GGN": Color.GREEN,
    "KFAC": Color.GREEN,
    "AdaHessian": Color.VERMILION,
}
"""Colors by the beginning of a method's name; others are gray."""

_LAYERS = ("#440154", "#31688E", "#35B779", "#D8A200", "#C2477F", "#222222")
_ROUNDING = 1e-10  # an error below this share of the largest one is rounding: the layer is exact
_SPREAD = 0.5  # height that the seeds of a method take around its line


_CAPTION = (
    "Distance of every estimate from the exact diagonal of the Hessian, in units of HesScale's (left) and layer by "
    "layer (right), on logarithmic scales."
)


def _error_figures(config: Config, records: Records) -> Iterator[Plot]:
    """One figure with a row of panels for each stage that was measured."""
    rows = [(stage, summarize(records, stage)) for stage in STAGES]
    rows = [(stage, lines) for stage, lines in rows if lines]
    if not rows:
        return
    height = 1.6 + 0.36 * max(len(lines) for _, lines in rows)
    figure = Figure(figsize=(12, height * len(rows)), layout="constrained", dpi=150)
    panels = figure.subplots(len(rows), 2, width_ratios=(1.35, 1), squeeze=False)
    layers = next(record["layers"] for record in records if record["kind"] == "quality")
    for (stage, lines), (total, by_layer) in zip(rows, panels, strict=True):
        suffix = f", {_stage_name(stage, config)}" if len(rows) > 1 else ""
        _draw_totals(total, lines, f"All parameters{suffix}")
        _draw_layers(by_layer, lines, layers, f"Layer by layer{suffix}")
    figure.suptitle(f"Distance from the exact Hessian diagonal: {_describe(config, rows[0][1])}")
    yield Plot("quality", _CAPTION, figure)


def _describe(config: Config, lines: Sequence[Summary]) -> str:
    seeds = counted(len(lines[0].relative_by_seed), "seed")
    return f"{verbatim(config['title'])}, {seeds} × {counted(config['examples'], 'example')}"


def _stage_name(stage: str, config: Config) -> str:
    return f"after {counted(config['updates'], 'update')}" if stage == "trained" else "before training"


def _color(method: str) -> str:
    return next((color for family, color in _FAMILIES.items() if method.startswith(family)), _GRAY)


def _draw_totals(axes: Axes, lines: Sequence[Summary], title: str) -> None:
    """A dot per seed and a bar at the mean, on a logarithmic scale."""
    reference = next(line.relative for line in lines if line.method == ZERO)
    axes.axvline(reference, color=_GRAY, linewidth=1, linestyle="--", zorder=0)
    shown = [line for line in lines if line.relative > _ROUNDING]
    lowest, highest = (pick(error for line in shown for error in line.relative_by_seed) for pick in (min, max))
    left = 0.75 * min(1.0, reference, lowest)
    for row, line in enumerate(lines):
        color = _color(line.method)
        if line not in shown:
            _write(axes, "exact", left, row, color)
            continue
        heights = [row + offset for offset in _offsets(len(line.relative_by_seed))]
        axes.plot(line.relative_by_seed, heights, "o", color=color, alpha=0.4, markersize=4, markeredgewidth=0)
        axes.plot([line.relative] * 2, [row - 0.34, row + 0.34], color=color, linewidth=3, solid_capstyle="round")
        text = f"{line.relative:,.0f}" if line.relative >= 100 else f"{line.relative:.3g}"
        _write(axes, text, max(line.relative, *line.relative_by_seed), row, color)
    axes.set_yticks(range(len(lines)), [_name(line.method) for line in lines])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(left, 2.5 * max(reference, highest))
    label_log(axes.xaxis, short=math.inf if highest < 2000 else 0)
    axes.set_xlabel(f"L1 error / {REFERENCE}'s (dots: seeds, bar: mean, dashes: {ZERO})")
    axes.set_title(title, fontsize="medium")
    tidy(axes)


def _write(axes: Axes, text: str, x: float, y: float, color: str) -> None:
    """Writes to the right of a point."""
    axes.annotate(text, (x, y), xytext=(7, 0), textcoords="offset points", va="center", color=color, weight="bold")


def _name(method: str) -> str:
    if method == ZERO:
        return f"{ZERO} (estimate 0)"
    return verbatim(method.replace(AS_CODED, " as coded by the authors"))


def _draw_layers(axes: Axes, lines: Sequence[Summary], layers: Sequence[str], title: str) -> None:
    """A point per layer. Errors that are mere rounding are hollow at the foot of the logarithmic axis."""
    largest = max(max(line.by_layer) for line in lines)
    visible = [error for line in lines for error in line.by_layer if error > _ROUNDING * largest]
    foot = min(visible) / 4
    for layer, name in enumerate(layers):
        color = _LAYERS[layer % len(_LAYERS)]
        height = 0.5 * (layer / max(1, len(layers) - 1) - 0.5)  # coinciding points stay visible
        label = f"{layer + 1} of {len(layers)}" if name.isdecimal() else verbatim(name)
        for row, line in enumerate(lines):
            error = line.by_layer[layer]
            exact = error <= _ROUNDING * largest
            axes.plot(
                foot if exact else error,
                row + height,
                "o",
                color="white" if exact else color,
                markeredgecolor=color,
                markersize=7,
                alpha=0.85,
                label=label if not row else None,
                zorder=3,
            )
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_yticks(range(len(lines)), [""] * len(lines))
    axes.tick_params(axis="y", length=0)
    axes.set_xscale("log")
    label_log(axes.xaxis)
    axes.set_xlabel("mean L1 error (hollow: exact up to rounding)")
    axes.set_title(title, fontsize="medium")
    axes.legend(title="layer", frameon=True, edgecolor="none", fontsize="small", title_fontsize="small", loc="best")
    tidy(axes)


def _offsets(count: int) -> list[float]:
    """``count`` equal steps around zero, so that no point hides another."""
    return [_SPREAD * (i / (count - 1) - 0.5) if count > 1 else 0.0 for i in range(count)]


def is_record(record: Record) -> bool:
    """Whether a record of kind "quality" has what tables and figures need."""
    errors, layers = record["errors"], record["layers"]
    return (
        record["stage"] in STAGES
        and isinstance(record["seed"], int)
        and all(isinstance(layer, str) for layer in layers)
        and all(len(row) == len(layers) and all(map(is_size, row)) for row in errors.values())
        and sum(errors[REFERENCE]) > 0
        and ZERO in errors
    )


STUDY = Study(
    "how close estimates come to the exact diagonal, and in which time",
    lambda quick: config_of("paper", quick=quick),
    cells,
    ("kind", "seed"),
    measure,
    {"quality": is_record, "time": quality_time.is_record},
    tables,
    rows,
    figures,
)
