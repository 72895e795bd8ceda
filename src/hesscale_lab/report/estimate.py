"""A mean over seeds and how sure of it we are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean and its standard error; the error of one seed is nan, not zero."""

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
    """mean ± standard error; the mean alone of a single seed."""
    error = "" if math.isnan(value.error) else f" ± {_rounded(value.error, digits)}"
    return f"{_rounded(value.mean, digits)}{error}"


def _rounded(value: float, digits: int) -> str:
    """The loss of a run that diverged would otherwise fill a line with its digits."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.2e}"


def percent(value: Estimate) -> str:
    """The same, of a fraction, in per cent."""
    return plain(Estimate(100 * value.mean, 100 * value.error), digits=2)
