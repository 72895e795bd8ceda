"""The color and marker of every optimizer, the same in all figures.

Okabe & Ito's colors, which most color-blind readers tell apart: propagated estimates blue and purple, Gauss-Newton by
sampling green, Hutchinson's probes vermilion, as in the figures of the estimates themselves; first-order methods black
and gray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

STYLES: Mapping[str, tuple[str, str]] = {
    "AdaHesScale": ("#0072B2", "o"),
    "AdaHesScaleGN": ("#56B4E9", "s"),
    "AdaBL89": ("#CC79A7", "^"),
    "AdaHessian": ("#D55E00", "D"),
    "AdaGGNMC": ("#009E73", "v"),
    "Adam": ("#222222", "P"),
    "SGD": ("#8C8C8C", "X"),
}
"""In the order in which figures and tables list them."""

_OTHERS = (("#E69F00", "h"), ("#B8A800", "*"), ("#7A4B9A", "<"), ("#8A5A2B", ">"))


def styles(optimizers: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The color and marker of each, in the order of the table; what the table does not name comes after it."""
    names = set(optimizers)
    others = sorted(names - set(STYLES))
    found = {name: style for name, style in STYLES.items() if name in names}
    return found | {name: _OTHERS[place % len(_OTHERS)] for place, name in enumerate(others)}
