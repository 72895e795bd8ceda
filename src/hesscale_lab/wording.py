"""Numbers as text, means with standard errors, and tables, in one notation for terminal, page and files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


def counted(number: int, noun: str) -> str:
    """'1 epoch', '2 epochs', '5,120 training examples'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def power(value: float) -> str:
    """A step size: 1e-4, 3e-4, 1, 2.5e1."""
    digits, _, exponent = f"{value:e}".partition("e")
    short = f"{float(digits):g}"
    return short if not exponent or not int(exponent) else f"{short}e{int(exponent)}"


def one_line(error: BaseException) -> str:
    """The error's class and text, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class Estimate(NamedTuple):
    """A mean and its standard error, which is nan for a single value."""

    mean: float
    error: float


def estimate(values: Sequence[float]) -> Estimate:
    """mean ± s/√n with s² = Σ(x − mean)²/(n − 1): with three seeds, dividing by n would promise too much."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan)
    return Estimate(mean, math.hypot(*(x - mean for x in values)) / math.sqrt((count - 1) * count))


def plain(value: Estimate, *, digits: int = 4) -> str:
    """'mean ± standard error', or the mean alone for a single value."""
    error = "" if math.isnan(value.error) else f" ± {_rounded(value.error, digits)}"
    return f"{_rounded(value.mean, digits)}{error}"


def _rounded(value: float, digits: int) -> str:
    """Fixed digits; the huge loss of a diverged run would fill a line, so it gets an exponent."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.2e}"


def percent(value: Estimate) -> str:
    """'mean ± standard error' of a fraction, in per cent."""
    return plain(Estimate(100 * value.mean, 100 * value.error), digits=2)


@dataclass(frozen=True)
class Table:
    """A table of text: the first column is words, the others are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as a CSV file, with a column for each key of any row; nan is an empty cell."""
    known = [{key: "" if value != value else value for key, value in row.items()} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in known for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(known)
    return text.getvalue()
