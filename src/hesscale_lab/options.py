"""The options of optimizers that a run may set, as a table. A run records those that differ from their default."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

EPS = 1e-8

Options = tuple[tuple[str, Any], ...]
"""Names and values of an optimizer's options, sorted by name, without those that have their default."""


@dataclass(frozen=True)
class Option:
    """An option's default, how its text is read, and its possible values in words."""

    default: Any
    read: Callable[[str], Any]  # ValueError if the text is no such value
    values: str


def _number(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError
    return value


def _whole(text: str, least: int) -> int:
    if (value := int(text)) < least:
        raise ValueError
    return value


def _number_or_none(text: str) -> float | None:
    return None if text == "none" else _number(text)


OPTIONS: Mapping[str, Option] = {
    "every": Option(1, lambda text: _whole(text, 1), "a whole number of steps, 1 or more"),
    "eps": Option(EPS, _number, "a positive number"),
    "bound": Option(None, _number_or_none, "a positive number, or none for the paper's algorithm"),
    "trust_region": Option(None, _number_or_none, "a positive number, or none"),
    "rank": Option(
        0, lambda text: text if text == "full" else _whole(text, 0), "a whole number of columns, 0 or more, or full"
    ),
}
"""hesscale.optim.CurvatureScaled explains them. The defaults here are the paper's algorithm, without a bound."""


def combinations(texts: Mapping[str, str | None]) -> list[Options]:
    """Every combination of the options given, each as values with commas between them; [()] if none is given."""
    columns = [
        [(name, _read_option(name, word)) for word in text.split(",")]
        for name, text in texts.items()
        if text is not None
    ]
    return list(dict.fromkeys(_without_defaults(pairs) for pairs in product(*columns)))


def _read_option(name: str, text: str) -> Any:
    try:
        return OPTIONS[name].read(text.strip())
    except ValueError:
        flag = name.replace("_", "-")
        raise ValueError(f"--{flag} must be {OPTIONS[name].values}, not {text!r}") from None


def _without_defaults(pairs: Iterable[tuple[str, Any]]) -> Options:
    return tuple(sorted((name, value) for name, value in pairs if value != OPTIONS[name].default))


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "none"
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def option_words(options: Iterable[tuple[str, Any]]) -> list[str]:
    """'every=10', 'bound=1' and so on."""
    return [f"{name}={as_text(value)}" for name, value in options]


def label(optimizer: str, options: Iterable[tuple[str, Any]]) -> str:
    """The optimizer with its options, such as 'AdaHesScale every=10'."""
    return " ".join([optimizer, *option_words(options)])
