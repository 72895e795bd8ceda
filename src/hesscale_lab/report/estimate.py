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
