"""Options of the optimizers that a run may set, as a table. A run records only those that differ from what is usual."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

Options = tuple[tuple[str, Any], ...]
"""Names and values, sorted by name; what is usual is not among them."""


@dataclass(frozen=True)
class Option:
    """How an option is written, and what it is where it is not given."""

    usual: Any
    read: Callable[[str], Any]  # ValueError if it is no such value
    values: str  # in words


def _whole(text: str, *, least: int) -> int:
    value = int(text)
    if value < least:
        raise ValueError
    return value


def _number(text: str, *, above: float) -> float:
    value = float(text)
    if not above < value < math.inf:
        raise ValueError
    return value


def _number_or_none(text: str) -> float | None:
    return None if text == "none" else _number(text, above=0.0)


def _rank(text: str) -> int | str:
    return text if text == "full" else _whole(text, least=0)


EPS = 1e-8

OPTIONS: Mapping[str, Option] = {
    "every": Option(1, lambda text: _whole(text, least=1), "a whole number of steps, 1 or more"),
    "eps": Option(EPS, lambda text: _number(text, above=0.0), "a positive number"),
    "bound": Option(None, _number_or_none, "a positive number, or none for the paper's algorithm"),
    "trust_region": Option(None, _number_or_none, "a positive number, or none"),
    "rank": Option(0, _rank, "a whole number of columns, 0 or more, or full"),
}
"""What they mean: hesscale.optim.CurvatureScaled. Usual here is the paper's algorithm, without a bound."""


def read_option(name: str, text: str) -> Any:
    """The value that was written so; ValueError in one sentence if it is none."""
    try:
        return OPTIONS[name].read(text.strip())
    except ValueError:
        flag = name.replace("_", "-")
        raise ValueError(f"--{flag} must be {OPTIONS[name].values}, not {text!r}") from None


def combinations(texts: Mapping[str, str | None]) -> list[Options]:
    """Every combination of what was given, values with commas between them; [()] if nothing was."""
    given = {name: text for name, text in texts.items() if text is not None}
    columns = [[(name, read_option(name, word)) for word in text.split(",")] for name, text in given.items()]
    return list(dict.fromkeys(unusual(pairs) for pairs in product(*columns)))


def unusual(pairs: Iterable[tuple[str, Any]]) -> Options:
    """Those that differ from what is usual, sorted by name."""
    return tuple(sorted((name, value) for name, value in pairs if value != OPTIONS[name].usual))


def written(value: Any) -> str:
    """A value as it is given on the command line."""
    if value is None:
        return "none"
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def words(options: Iterable[tuple[str, Any]]) -> list[str]:
    """'every=10', 'bound=1' and so on."""
    return [f"{name}={written(value)}" for name, value in options]


def flags(options: Options) -> list[str]:
    """The same as words of a command."""
    return [f"--{name.replace('_', '-')} {written(value)}" for name, value in options]


def label(optimizer: str, options: Iterable[tuple[str, Any]]) -> str:
    """What curves and tables call an optimizer with these options: 'AdaHesScale every=10'."""
    return " ".join([optimizer, *words(options)])
