"""What all figures share: colors of optimizers, lines with error bars, and how figures become files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from colorsys import hls_to_rgb, rgb_to_hls
from dataclasses import dataclass
from enum import StrEnum
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, LogLocator, NullFormatter, StrMethodFormatter
from PIL import Image

from .wording import Estimate


class Color(StrEnum):
    """Okabe & Ito's colors, which most color-blind readers tell apart, and some others.

    In all figures: propagated estimates blue and purple, Gauss-Newton by sampling green, Hutchinson's probes vermilion,
    first-order methods black and gray.
    """

    BLUE = "#0072B2"
    SKY = "#56B4E9"
    GREEN = "#009E73"
    VERMILION = "#D55E00"
    PURPLE = "#CC79A7"
    ORANGE = "#E69F00"
    BLACK = "#222222"
    GRAY = "#8C8C8C"
    BROWN = "#8A5A2B"
    VIOLET = "#7A4B9A"


STYLES: Mapping[str, tuple[str, str]] = {
    "AdaHesScale": (Color.BLUE, "o"),
    "AdaHesScaleGN": (Color.SKY, "s"),
    "AdaBL89": (Color.PURPLE, "^"),
    "AdaHessian": (Color.VERMILION, "D"),
    "AdaGGNMC": (Color.GREEN, "v"),
    "Adam": (Color.BLACK, "P"),
    "AdamFused": ("#5A5A5A", "p"),
    "SGD": (Color.GRAY, "X"),
}
"""Color and marker of the optimizers, in the order of figures and tables."""

_OTHERS = ((Color.ORANGE, "h"), ("#B8A800", "*"), (Color.VIOLET, "<"), (Color.BROWN, ">"))
_TURN, _DARKER = 0.19, 0.85  # of the hue, for each further line of one optimizer; grays have no hue to turn
_MARKERS = "^<*dx+12"
_PALETTE = 256


@dataclass(frozen=True)
class Plot:
    """A figure, its file name without ending, its caption, and the same figure for narrow screens if there is one."""

    name: str
    caption: str
    figure: Figure
    narrow: Figure | None = None


def save(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Writes the figure as files of these kinds."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    for path in paths:
        if path.suffix == ".png":
            path.write_bytes(as_png(figure))
        else:  # without a date, so that the same numbers make the same file
            figure.savefig(path, metadata={"Date": None})
        figure.set_layout_engine("none")  # the layout is done; doing it again would take seconds
    return paths


def as_png(figure: Figure) -> bytes:
    """The figure as a PNG file with a palette: a third of the size, and nobody sees the difference."""
    full, small = BytesIO(), BytesIO()
    figure.savefig(full, format="png")
    Image.open(full).convert("RGB").quantize(_PALETTE).save(small, "PNG", optimize=True)
    return small.getvalue()


def verbatim(text: str) -> str:
    r"""The text without mathematics: matplotlib would read what stands between two $, and refuse $\frac{$."""
    return text.replace("$", r"\$")


def draw_line(
    axes: Axes, places: Sequence[float], values: Sequence[Estimate], *, color: str, marker: str, label: str
) -> None:
    """Means with bars of two standard errors, where there are several values."""
    bars = [0.0 if math.isnan(value.error) else 2 * value.error for value in values]
    means = [value.mean for value in values]
    axes.errorbar(places, means, bars, color=color, marker=marker, markersize=5, linewidth=1, label=verbatim(label))


def label_log(axis: Axis, *, formatter: Formatter | None = None, short: float = 200) -> None:
    """Labels a logarithmic axis at powers of ten, or at 1, 2, 5, 10 … if the axis is shorter than this factor."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < short * low else (1,)))
    axis.set_major_formatter(formatter or StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def tidy(axes: Axes) -> None:
    """Removes the frame above and on the right, and puts a light grid behind everything."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def legend_of_all(figure: Figure, panels: Iterable[Axes], *, columns: int) -> None:
    """One legend below the figure for the lines of all panels."""
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")


def styles(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The color and marker of each label, in the order of STYLES and then of the alphabet.

    An optimizer with options ('AdaHesScale every=10') comes after it without, in another hue and with another marker.
    """
    by_name: dict[str, list[str]] = {}
    for label in sorted(sorted(set(labels)), key=_in_order):
        by_name.setdefault(label.partition(" ")[0], []).append(label)
    others = {name: _OTHERS[n % len(_OTHERS)] for n, name in enumerate(sorted(by_name.keys() - STYLES.keys()))}
    return {
        label: _shade(style, number + (by_name[name][0] != name))
        for name, style in {**STYLES, **others}.items()
        for number, label in enumerate(by_name.get(name, []))
    }


def _in_order(label: str) -> list[tuple[str, float]]:
    """every=2 before every=10."""
    pairs = (word.partition("=") for word in label.split(" "))
    return [(name, float(value) if value.replace(".", "", 1).isdecimal() else math.inf) for name, _, value in pairs]


def _shade(style: tuple[str, str], number: int) -> tuple[str, str]:
    if not number:
        return style
    hue, light, full = rgb_to_hls(*(int(style[0][at : at + 2], 16) / 255 for at in (1, 3, 5)))
    channels = hls_to_rgb((hue + _TURN * number) % 1, light * _DARKER**number, full)
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in channels), _MARKERS[(number - 1) % len(_MARKERS)]
