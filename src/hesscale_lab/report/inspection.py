"""A network's curvature in two figures: how many entries are of which size, and the same by layer as a heat map."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..figures import Color, Plot, tidy, verbatim

_BINS = 48
_DECADES = 10
"""What is so many powers of ten below the largest is counted with what is zero."""


def figures(diagonal: Mapping[str, Tensor]) -> Iterator[Plot]:
    """The histogram of all entries, and the heat map; none if all are zero."""
    values = {name: h.detach().flatten().double().cpu() for name, h in diagonal.items()}
    largest = max(float(h.abs().max()) for h in values.values())
    if not largest > 0:
        return
    top = math.ceil(math.log10(largest))
    edges = torch.linspace(top - _DECADES, top, _BINS + 1, dtype=torch.float64)
    yield Plot(
        "histogram",
        "How many entries of the diagonal are of which size, those above and those below zero. "
        f"Not shown: {_share_left_out(values, edges):.1%} that are zero or below {10.0 ** float(edges[0]):.0e}.",
        _histogram(values, edges),
    )
    yield Plot(
        "heatmap",
        "The same for every parameter, as a share of its entries, whatever their sign. Dark: many.",
        _heat_map(values, edges),
    )


def counts(h: Tensor, edges: Tensor) -> Tensor:
    """How many entries have log₁₀|h| in which bin; smaller ones in none."""
    sizes = h.abs()[h != 0].log10()
    return torch.histc(sizes, bins=len(edges) - 1, min=float(edges[0]), max=float(edges[-1]))


def _share_left_out(values: Mapping[str, Tensor], edges: Tensor) -> float:
    total = sum(h.numel() for h in values.values())
    return 1 - sum(float(counts(h, edges).sum()) for h in values.values()) / total


def _histogram(values: Mapping[str, Tensor], edges: Tensor) -> Figure:
    everything = torch.cat([*values.values()])
    figure = Figure(figsize=(7.2, 3.4), layout="constrained", dpi=150)
    axes = figure.subplots()
    signs = (("h > 0", everything[everything > 0], Color.BLUE), ("h < 0", everything[everything < 0], Color.VERMILION))
    for label, some, color in signs:
        axes.stairs(counts(some, edges).tolist(), edges.tolist(), color=color, fill=True, alpha=0.55, label=label)
    axes.set(xlabel="log₁₀|h|", ylabel="entries", yscale="symlog")
    axes.legend(frameon=False)
    tidy(axes)
    return figure


def _heat_map(values: Mapping[str, Tensor], edges: Tensor) -> Figure:
    rows = [(counts(h, edges) / h.numel()).tolist() for h in values.values()]
    figure = Figure(figsize=(7.2, 1.2 + 0.24 * len(rows)), layout="constrained", dpi=150)
    axes = figure.subplots()
    image = axes.pcolormesh(edges.tolist(), range(len(rows) + 1), rows, cmap="Blues", vmin=0)
    axes.set_yticks([row + 0.5 for row in range(len(rows))], [verbatim(name) for name in values], fontsize="x-small")
    axes.invert_yaxis()
    axes.set_xlabel("log₁₀|h|")
    figure.colorbar(image, ax=axes, label="share of a parameter's entries")
    return figure
