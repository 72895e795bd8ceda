"""The records of a study, read from its run folder line by line: a damaged line costs what was in it, no more."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..runs import METRICS, Run

Record = Mapping[str, Any]
Checks = Mapping[str, Callable[[Record], bool]]
"""By kind of record, whether all is there that its readers need; a check may raise KeyError, TypeError or the like."""


@dataclass(frozen=True)
class Reading:
    """What can be read, and a sentence for every line that cannot."""

    records: tuple[Record, ...]
    left_out: tuple[str, ...]


def read(run: Run, checks: Checks) -> Reading:
    """The records that pass their check. A last line that is still being written is neither read nor complained of."""
    path = run.folder / METRICS
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else (b"",)
    found = [_parsed(line, checks) for line in lines]
    left_out = tuple(f"line {number} of {path}: not readable" for number, one in enumerate(found, 1) if one is None)
    return Reading(tuple(one for one in found if one is not None), left_out)


def _parsed(line: bytes, checks: Checks) -> Record | None:
    try:
        record = json.loads(line)
        return record if checks[record["kind"]](record) else None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def by(records: Iterable[Record], *keys: str) -> dict[Any, list[Record]]:
    """The records under their value of a key, or of several as a tuple, in the order in which these come up."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        values = tuple(record[key] for key in keys)
        found.setdefault(values if len(keys) > 1 else values[0], []).append(record)
    return found


def is_size(value: object) -> bool:
    """Whether it is a finite number, and not negative."""
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
