"""The table of the study of Laplace posteriors, for the terminal, the page and its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from ..studies.laplace import by_posterior
from ..studies.reading import Record
from ..wording import counted
from .table import Table, csv_text

_COLUMNS = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE %", "turned": "turned %", "noise": "noise %"}
_NOTE = (
    "Mean ± standard deviation over seeds. Turned, noise: the area under the ROC curve that tells test digits from "
    "digits turned by a quarter, and from noise, by confidence."
)


def laplace_tables(config: Mapping[str, Any], records: Sequence[Record]) -> Iterator[Table]:
    """What each posterior is worth."""
    if not records:
        return
    seeds = counted(len({record["seed"] for record in records}), "seed")
    rows = tuple((_title(*key), *(_cell(own, name) for name in _COLUMNS)) for key, own in by_posterior(records).items())
    yield Table(f"Laplace posteriors of an MLP on MNIST, {seeds}", ("posterior", *_COLUMNS.values()), rows, _NOTE)


def _title(diagonal: str, prior: str, prediction: str) -> str:
    return ", ".join(part for part in (diagonal, prior, prediction) if part)


def _cell(own: Sequence[Record], name: str) -> str:
    factor, digits = (1.0, 3) if name == "nll" else (100.0, 1)
    values = [factor * record[name] for record in own]
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def laplace_csv(records: Sequence[Record]) -> str:
    """One row per posterior and way to predict: means and standard deviations over seeds."""
    names = (*_COLUMNS, "clamped")
    header = ["diagonal", "prior", "prediction", "seeds", *(f"{n}{e}" for n in names for e in ("", "_sd"))]
    rows = []
    for key, own in by_posterior(records).items():
        numbers: list[str] = []
        for name in names:
            values = [record[name] for record in own]
            numbers += (f"{mean(values):.4f}", f"{stdev(values) if len(values) > 1 else 0.0:.4f}")
        rows.append([*key, len(own), *numbers])
    return csv_text(header, rows)
