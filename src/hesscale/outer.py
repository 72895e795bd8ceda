"""To be removed with the optimizers' use of it."""

from typing import Any


def factors_of(x: Any) -> Any:
    """None."""
    return None


def written_out(x: Any) -> Any:
    """The same."""
    return x
