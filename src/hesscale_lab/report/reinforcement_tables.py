"""The tables of the study of reinforcement learning, for the terminal, the page and its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..studies.reading import Record, by
from ..studies.reinforcement import Outcome, outcome
from .table import Table, csv_text

Outcomes = Mapping[float, Outcome]
"""By step size."""


def by_problem(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, Outcomes]]:
    """Outcomes by environment and algorithm, then by optimizer, then by step size."""
    return {
        problem: {
            name: {lr: outcome(cell) for lr, cell in sorted(by(own, "lr").items())}
            for name, own in by(some, "optimizer").items()
        }
        for problem, some in by(records, "environment", "algorithm").items()
    }


def reinforcement_tables(config: Mapping[str, Any], records: Sequence[Record]) -> Iterator[Table]:
    """The best of each optimizer and its width; then all step sizes."""
    problems = by_problem(records)
    for (environment, algorithm), optimizers in problems.items():
        runs = max(found.runs for own in optimizers.values() for found in own.values())
        top = max(found.gain for own in optimizers.values() for found in own.values())
        yield Table(
            f"{environment}, {algorithm}: returns at the end of {config['steps']} steps, {runs} seeds",
            ("optimizer", "best return", "± s.e.", "at lr", "wide", "mean gain", "collapsed %", "not finite %"),
            tuple((name, *_summary(own, top)) for name, own in optimizers.items()),
            "Wide: step sizes within 20 % of the best gain of all. Gain: 0 at random, 1 solved, mean over step sizes. "
            "Collapsed: not finite, or below half of the run's own best gain.",
        )
        rates = sorted({lr for own in optimizers.values() for lr in own})
        yield Table(
            f"{environment}, {algorithm}: mean return by step size (collapsed %)",
            ("optimizer", *(f"{lr:g}" for lr in rates)),
            tuple((name, *(_cell(own.get(lr)) for lr in rates)) for name, own in optimizers.items()),
        )


def _summary(own: Outcomes, top: float) -> tuple[str, ...]:
    best = max(own, key=lambda lr: own[lr].gain)
    found = own[best]
    wide = sum(one.gain >= 0.8 * top for one in own.values())
    shares = (sum(getattr(one, key) for one in own.values()) / len(own) for key in ("gain", "collapsed", "broken"))
    gain, collapsed, broken = shares
    return (
        f"{found.mean:.0f}",
        f"{found.error:.0f}",
        f"{best:g}",
        f"{wide} of {len(own)}",
        f"{gain:.2f}",
        f"{100 * collapsed:.0f}",
        f"{100 * broken:.0f}",
    )


def _cell(found: Outcome | None) -> str:
    return "" if found is None else f"{found.mean:.0f} ({100 * found.collapsed:.0f})"


def reinforcement_csv(records: Sequence[Record]) -> str:
    """One row per environment, algorithm, optimizer and step size."""
    header = "environment", "algorithm", "optimizer", "lr", "runs", "return", "error", "gain", "collapsed", "not_finite"
    rows = []
    for problem, optimizers in by_problem(records).items():
        for name, own in optimizers.items():
            for lr, found in own.items():
                numbers = (f"{found.mean:.1f}", f"{found.error:.1f}", f"{found.gain:.3f}")
                shares = (f"{found.collapsed:.2f}", f"{found.broken:.2f}")
                rows.append([*problem, name, lr, found.runs, *numbers, *shares])
    return csv_text(header, rows)
