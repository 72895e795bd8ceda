"""Numbers as words, in one notation for all tables, figures and messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """'1 epoch', '2 epochs', '5,120 training examples'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def power(value: float) -> str:
    """A step size: 1e-4, 3e-4, 1, 2.5e1."""
    digits, _, exponent = f"{value:e}".partition("e")
    short = f"{float(digits):g}"
    return short if not exponent or not int(exponent) else f"{short}e{int(exponent)}"
