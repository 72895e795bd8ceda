"""Which numbers a run may have: what training accepts is what a report reads."""

from __future__ import annotations

LARGEST = 1e100
"""What lies beyond it cannot be squared."""

MOST = 10**9 - 1
"""The largest seed, and the largest number of epochs or examples."""


def is_step_size(lr: float) -> bool:
    """Whether a run may have this lr."""
    return 0 < lr < LARGEST
