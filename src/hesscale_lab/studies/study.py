"""A study: cells that are measured one by one, and tables, figures and a CSV file of what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..figures import Plot
from ..runs import MEASUREMENTS, Run
from ..wording import Table

Config = Mapping[str, Any]
Record = Mapping[str, Any]
Records = Sequence[Record]
Check = Callable[[Record], bool]
"""Whether a record has all that its readers need; it may raise KeyError, TypeError or the like."""

Cell = tuple[Any, ...]
"""What is measured at once, and never again: after an interrupt a run continues with the next cell."""


class Measure(Protocol):
    """Measures a cell; each record names the cell in the fields ``Study.keys``."""

    def __call__(self, cell: Cell, config: Config, *, data: Path | None, folder: Path) -> Iterable[Record]:
        """``data`` is --data; ``folder`` is the run's, where a study may keep the networks that it trains."""


REFERENCE = "HesScale"
"""The method whose error is the unit of all relative errors."""
ZERO = "|diag H|"
"""The estimate zero, whose error is the L1 norm of the exact diagonal."""
STAGES = ("initial", "trained")


def no_figures(config: Config, records: Records) -> Iterator[Plot]:
    """No figure, for a study that has tables only."""
    return iter(())


@dataclass(frozen=True)
class Study:
    """One row of ``studies.table.STUDIES``."""

    summary: str  # for --help: the question, and how long the answer takes
    settings: Callable[[bool], Config]  # from --quick to the content of config.json
    cells: Callable[[Config], Sequence[Cell]]  # in the order in which they are measured
    keys: tuple[str, ...]  # the fields of a record that name its cell
    measure: Measure
    checks: Mapping[str, Check]  # by kind of record
    tables: Callable[[Config, Records], Iterator[Table]]
    rows: Callable[[Records], Iterable[Mapping[str, Any]]]  # of the CSV file
    figures: Callable[[Config, Records], Iterator[Plot]] = no_figures


@dataclass(frozen=True)
class Reading:
    """The readable records of a run, and a sentence for every line that is not readable."""

    records: tuple[Record, ...]
    left_out: tuple[str, ...]


def read(run: Run, checks: Mapping[str, Check]) -> Reading:
    """The records that pass their check, line by line; a last line without its end is still being written."""
    path = run.folder / MEASUREMENTS
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else (b"",)
    parsed = [_parsed(line, checks) for line in lines]
    left_out = tuple(f"line {number} of {path}: not readable" for number, one in enumerate(parsed, 1) if one is None)
    return Reading(tuple(one for one in parsed if one is not None), left_out)


def _parsed(line: bytes, checks: Mapping[str, Check]) -> Record | None:
    try:
        record = json.loads(line)
        return record if checks[record["kind"]](record) else None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def has(**fields: Callable[[Any], bool]) -> Check:
    """The check that every one of these fields is there and fits."""
    return lambda record: all(fits(record[name]) for name, fits in fields.items())


def is_word(value: object) -> bool:
    """Whether the value is text."""
    return isinstance(value, str)


def is_whole(value: object) -> bool:
    """Whether the value is a whole number."""
    return isinstance(value, int)


def is_number(value: object) -> bool:
    """Whether the value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def is_size(value: object) -> bool:
    """Whether the value is a finite number from 0."""
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def by(records: Iterable[Record], *keys: str) -> dict[Any, list[Record]]:
    """The records grouped by the value of a key, or by the tuple of several, in order of first appearance."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        values = tuple(record[key] for key in keys)
        groups.setdefault(values if len(keys) > 1 else values[0], []).append(record)
    return groups
