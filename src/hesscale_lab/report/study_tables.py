"""The tables of the studies of estimates and of cost, for the terminal and for the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..studies import cost
from ..studies.approximation_quality import REFERENCE, STAGES, ZERO, summarize
from ..studies.error_per_time import cells_of
from ..studies.optimizer_steps import UNIT
from ..studies.reading import Record
from ..tasks import cost_networks
from ..wording import counted
from .table import Table

Config = Mapping[str, Any]


def quality_tables(config: Config, records: Sequence[Record]) -> Iterator[Table]:
    """The errors of all estimates, stage by stage."""
    for stage in STAGES:
        lines = summarize(records, stage)
        if not lines:
            continue
        when = "" if not config["updates"] else ", before training" if stage == STAGES[0] else ", after training"
        seeds = counted(len(lines[0].relative_by_seed), "seed")
        rows = [
            (
                line.method,
                f"{line.error:.4g}",
                f"{line.relative:.2f}",
                f"{min(line.relative_by_seed):.2f} … {max(line.relative_by_seed):.2f}",
            )
            for line in lines
        ]
        yield Table(
            f"L1 distance from the exact Hessian diagonal: {config['title']}{when}, {seeds} × "
            f"{counted(config['examples'], 'example')}",
            ("method", "mean L1 error", "relative", "lowest … highest seed"),
            tuple(rows),
            f"Relative: to {REFERENCE}'s error. {ZERO}: estimate 0. As coded: |Hv| of one probe, over 50 for MC50, as "
            "in the authors' experiment.",
        )


def time_tables(config: Config, records: Sequence[Record]) -> Iterator[Table]:
    """What sampling reaches: with one sample, and with as many as fit in the time HesScale takes."""
    for (stage, batch), cell in cells_of(records).items():
        unit = next(record for record in cell if record["method"] == REFERENCE)
        yield Table(
            f"Error per unit of time: {config['title']}, {stage}, batch {batch}",
            ("method", "samples", "ms", "relative time", "relative error"),
            tuple(_time_row(record, unit) for record in cell),
        )


def _time_row(record: Record, unit: Record) -> tuple[str, ...]:
    seconds, error = record["seconds"], f"{record['error'] / unit['error']:.2f}"
    if seconds is None:
        return record["method"], "exact" if record["method"] == "GGN" else "", "", "", error
    return (
        record["method"],
        str(record["samples"] or ""),
        f"{1000 * seconds:.2f}",
        f"{seconds / unit['seconds']:.2f}",
        error,
    )


def cost_tables(config: Config, records: Sequence[Record]) -> Iterator[Table]:
    """The headline, both panels, growth, single networks and memory, as far as they were measured."""
    yield from _headline(records)
    yield from _panels(records)
    yield from _growth(records)
    yield from _networks(records)
    yield from _memory(records)


def _headline(records: Sequence[Record]) -> Iterator[Table]:
    means = cost.headline(records)
    if means:
        layers, batches = (", ".join(map(str, some)) for some in (cost_networks.HEADLINE, cost_networks.BATCHES))
        cells = counted(max(mean.cells for mean in means), "cell")
        yield Table(
            f"Cost of a step relative to {UNIT}'s, geometric means of {cells}",
            ("optimizer", "whole", "no forward", "whole / fused Adam's"),
            tuple(
                (m.optimizer, f"{m.ratio:.2f}", f"{m.ratio_without_forward:.2f}", f"{m.ratio_to_fused:.2f}")
                for m in means
            ),
            f"{layers} layers of {cost_networks.WIDTH} tanh units, batch {batches}. Whole: forward, backward, update, "
            "clearing. No forward: backward and update, as in the paper.",
        )


_PANELS = {"layers": "more and more layers", "outputs": "one layer, more and more outputs"}


def _panels(records: Sequence[Record]) -> Iterator[Table]:
    """Both panels without the forward pass, beside the paper's own ratios."""
    for panel, what in _PANELS.items():
        measured = cost.of_kind(records, "time", panel=panel, exact=False)
        batches = sorted({record["batch"] for record in measured})
        rows = []
        for name in cost.by_optimizer(measured):
            ratios = (cost.papers_ratio(panel, name), *(cost.ratio_of(measured, name, b, panel) for b in batches))
            rows.append((name, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)))
        if rows:
            headings = ("optimizer", "paper", *(f"batch {batch}" for batch in batches))
            yield Table(f"Backward and update relative to {UNIT}'s: {what}", headings, tuple(rows))


def _growth(records: Sequence[Record]) -> Iterator[Table]:
    grown = {(line.optimizer, line.batch): line for line in cost.growth(records)}
    batches = sorted({batch for _, batch in grown})
    if grown:
        names = dict.fromkeys(name for name, _ in grown)
        yield Table(
            "Growth: the exponent a of seconds ∝ parameters^a, whole step, all layers (larger half)",
            ("optimizer", *(f"batch {batch}" for batch in batches)),
            tuple((name, *(_exponents(grown.get((name, batch))) for batch in batches)) for name in names),
            "Small networks are mostly overhead, which does not grow.",
        )


def _exponents(line: cost.Growth | None) -> str:
    if line is None:
        return ""
    return f"{line.exponent:.2f}" + ("" if line.of_larger_half is None else f" ({line.of_larger_half:.2f})")


def _networks(records: Sequence[Record]) -> Iterator[Table]:
    measured = cost.of_kind(records, "time", panel="networks")
    for cell in dict.fromkeys(record["cell"] for record in measured):
        rows = [
            (
                record["optimizer"],
                f"{1000 * record['seconds']:.1f}",
                f"{record['ratio']:.2f}",
                f"{record['ratio_without_forward']:.2f}",
                f"{record['ratio_to_fused']:.2f}",
            )
            for record in measured
            if record["cell"] == cell
        ]
        headings = ("optimizer", "ms", "whole", "no forward", "whole / fused Adam's")
        yield Table(f"Cost of a step relative to {UNIT}'s: {cell}", headings, tuple(rows))


def _memory(records: Sequence[Record]) -> Iterator[Table]:
    measured = cost.of_kind(records, "memory")
    cells = list(dict.fromkeys(record["cell"] for record in measured))
    found = {(record["optimizer"], record["cell"]): record for record in measured}
    if cells:
        yield Table(
            f"Peak of memory during a step relative to {UNIT}'s (MiB)",
            ("optimizer", *cells),
            tuple((name, *(_peak(found.get((name, cell))) for cell in cells)) for name in cost.by_optimizer(measured)),
            "All tensors: parameters, state, activations, temporaries.",
        )


def _peak(record: Record | None) -> str:
    return "" if record is None else f"{record['ratio']:.2f} ({record['peak'] / 2**20:.0f})"
