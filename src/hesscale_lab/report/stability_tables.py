"""The table of the study of stability, for the terminal, the page and its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..studies.reading import Record, by
from ..studies.stability import STEPS, share
from ..wording import counted
from .table import Table, csv_text


def stability_tables(config: Mapping[str, Any], records: Sequence[Record]) -> Iterator[Table]:
    """The share of runs that ended badly, by optimizer and step size."""
    if not records:
        return
    rates = sorted({record["lr"] for record in records})
    networks = counted(len({record["network"] for record in records}), "network")
    rows = []
    for name, own in by(records, "optimizer").items():
        all_of_it = share(own)
        cells = [[record for record in own if record["lr"] == lr] for lr in rates]
        worse = (share(cell).worse if cell else None for cell in cells)
        rows.append((name, *map(_percent, (*worse, all_of_it.worse, all_of_it.broken, all_of_it.spiked))))
    yield Table(
        f"Runs that ended above their start or not finite, in percent: {networks}, {STEPS} steps",
        ("optimizer", *(f"lr {lr:g}" for lr in rates), "all", "not finite", "spiked"),
        tuple(rows),
        "Batches of 2, 8 and 32. Spiked: a loss above 1.5 times the first plus a half on the way.",
    )


def as_csv(records: Sequence[Record]) -> str:
    """Shares by optimizer, step size, batch size and data, one row each."""
    keys = ("optimizer", "lr", "batch", "data")
    rows = []
    for cell, own in by(records, *keys).items():
        found = share(own)
        rows.append([*cell, found.runs, *(f"{value:.4f}" for value in (found.worse, found.broken, found.spiked))])
    return csv_text([*keys, "runs", "worse", "not_finite", "spiked"], rows)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"
