"""The color and marker of every optimizer, the same in all figures.

Okabe & Ito's colors, which most color-blind readers tell apart: propagated estimates blue and purple, Gauss-Newton by
sampling green, Hutchinson's probes vermilion, as in the figures of the estimates themselves; first-order methods black
and gray.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from colorsys import hls_to_rgb, rgb_to_hls

STYLES: Mapping[str, tuple[str, str]] = {
    "AdaHesScale": ("#0072B2", "o"),
    "AdaHesScaleGN": ("#56B4E9", "s"),
    "AdaBL89": ("#CC79A7", "^"),
    "AdaHessian": ("#D55E00", "D"),
    "AdaGGNMC": ("#009E73", "v"),
    "Adam": ("#222222", "P"),
    "AdamFused": ("#5A5A5A", "p"),
    "SGD": ("#8C8C8C", "X"),
}
"""In the order in which figures and tables list them."""

_OTHERS = (("#E69F00", "h"), ("#B8A800", "*"), ("#7A4B9A", "<"), ("#8A5A2B", ">"))
_TURN, _DARKER = 0.19, 0.85  # of the hue, for each further line of one optimizer; grays have no hue to turn
_MARKS = "^<*dx+12"


def styles(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The color and marker of each, in the order of the table; what the table does not name comes after it.

    An optimizer with options ('AdaHesScale every=10') comes after it without, in another hue and with another mark.
    """
    by_name: dict[str, list[str]] = {}
    for label in sorted(sorted(set(labels)), key=_in_order):
        by_name.setdefault(label.partition(" ")[0], []).append(label)
    others = {name: _OTHERS[place % len(_OTHERS)] for place, name in enumerate(sorted(by_name.keys() - STYLES.keys()))}
    found: dict[str, tuple[str, str]] = {}
    for name, style in {**STYLES, **others}.items():
        own = by_name.get(name, [])
        found |= {label: _shade(style, place + (own[0] != name)) for place, label in enumerate(own)}
    return found


def _in_order(label: str) -> list[tuple[str, float]]:
    """every=2 before every=10."""
    pairs = (word.partition("=") for word in label.split(" "))
    return [(name, float(value) if value.replace(".", "", 1).isdecimal() else math.inf) for name, _, value in pairs]


def _shade(style: tuple[str, str], place: int) -> tuple[str, str]:
    if not place:
        return style
    hue, light, full = rgb_to_hls(*(int(style[0][at : at + 2], 16) / 255 for at in (1, 3, 5)))
    channels = hls_to_rgb((hue + _TURN * place) % 1, light * _DARKER**place, full)
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in channels), _MARKS[(place - 1) % len(_MARKS)]
