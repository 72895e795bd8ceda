"""A figure with what it shows in words, and how figures become files. Names from run folders are never mathematics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ..report.estimate import Estimate

Config = Mapping[str, Any]
Records = Sequence[Mapping[str, Any]]

_COLORS = 256


@dataclass(frozen=True)
class Drawn:
    """A figure, its file name without ending, its caption, and the same for narrow screens if there is such."""

    name: str
    caption: str
    figure: Figure
    narrow: Figure | None = None


def save(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """The paths of the figure as files of these kinds."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    for path in paths:
        if path.suffix == ".png":
            path.write_bytes(as_png(figure))
        else:  # without a date, so that the same numbers make the same file
            figure.savefig(path, metadata={"Date": None})
        figure.set_layout_engine("none")  # it is laid out now; doing it again would take seconds
    return paths


def as_png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file with a palette: a third of the size, and nobody sees the difference."""
    whole, small = BytesIO(), BytesIO()
    figure.savefig(whole, format="png")
    Image.open(whole).convert("RGB").quantize(_COLORS).save(small, "PNG", optimize=True)
    return small.getvalue()


def verbatim(text: str) -> str:
    r"""The text as it is: matplotlib would read what stands between two $ as mathematics, and refuse $\frac{$."""
    return text.replace("$", r"\$")


def draw_line(
    axes: Axes, places: Sequence[float], found: Sequence[Estimate], *, color: str, marker: str, label: str
) -> None:
    """Means with bars of two standard errors, of those that have one."""
    bars = [0.0 if math.isnan(value.error) else 2 * value.error for value in found]
    means = [value.mean for value in found]
    axes.errorbar(places, means, bars, color=color, marker=marker, markersize=5, linewidth=1, label=verbatim(label))


def tidy(axes: Axes) -> None:
    """No frame above and on the right, a light grid behind everything."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
