"""A look at one's network: the curvature of every layer in numbers, and what rounding its weights would cost.

``hesscale.check`` tells which operations a pass meets; this tells what came out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor, nn

from ..estimators.problem import LossFunction
from .masks import all_places
from .over_batches import Batches, How, diagonal_over

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
BITS = (8, 4)


@dataclass(frozen=True)
class Layer:
    """One parameter. Of its entries h of the diagonal:"""

    name: str
    size: int  # how many there are
    trace: float  # Σ h
    quantiles: tuple[float, ...]  # at QUANTILES
    negative: float  # the share of h < 0
    zero: float  # the share of h = 0: weights that the loss does not see, or is linear in
    sensitivity: Mapping[int, float]  # by bits: the loss that rounding to so many is expected to cost


@dataclass(frozen=True)
class Inspection:
    """All parameters, in the model's order. Prints as a table.

    >>> model, batches = nn.Linear(2, 1), [(torch.randn(8, 2), torch.randn(8, 1))]
    >>> [layer.name for layer in hesscale.applications.inspect(model, F.mse_loss, batches).layers]
    ['weight', 'bias']
    """

    layers: tuple[Layer, ...]
    diagonal: Mapping[str, Tensor] = field(repr=False)

    @property
    def most_sensitive(self) -> tuple[Layer, ...]:
        """Those first whose rounding to the fewest bits costs most: keep these at more bits."""
        return tuple(sorted(self.layers, key=lambda layer: -layer.sensitivity[min(BITS)]))

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The table, headings first."""
        quantiles = (f"{share:.0%}" if share != 0.5 else "median" for share in QUANTILES)
        headings = ("layer", "weights", "trace", *quantiles, "h < 0", "h = 0", *(f"{bits} bits" for bits in BITS))
        return (headings, *(_row(layer) for layer in self.layers))

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
            ).rstrip()
            for row in self.rows
        ]
        return "\n".join(lines)


def inspect(
    model: nn.Module, loss_fn: LossFunction | None = None, batches: Batches | None = None, **how: Unpack[How]
) -> Inspection:
    """The curvature of every parameter over all batches, in numbers.

    Sensitivity: rounding w to one of 2^b evenly spaced values between the least and the largest weight of its tensor, a
    step of Δ = (max − min) / (2^b − 1) apart, makes errors that are taken for independent and uniform in ±Δ/2. Their
    mean is 0 and their variance Δ²/12, so that the loss is expected to change by

        ½ Σ_i h_i Δ²/12 = Δ²/24 · trace

    in its quadratic model: below zero where the trace is. Weights that were pruned count as the zeros they are.

    >>> model, batches = nn.Linear(2, 1, bias=False), [(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1))]
    >>> hesscale.applications.inspect(model, F.mse_loss, batches).layers[0].trace
    20.0
    """
    diagonal = diagonal_over(model, loss_fn, batches, **how)
    places = {place.today: place for place in all_places(model)}
    layers = tuple(_layer(name, h, places[name].weight) for name, h in diagonal.items() if h.numel())
    return Inspection(layers, diagonal)


def _layer(name: str, h: Tensor, w: Tensor) -> Layer:
    trace = float(h.double().sum())
    return Layer(
        name,
        h.numel(),
        trace,
        _quantiles(h.flatten().double()),
        float((h < 0).double().mean()),
        float((h == 0).double().mean()),
        {bits: trace / 24 * (float(w.max() - w.min()) / (2**bits - 1)) ** 2 for bits in BITS},
    )


def _quantiles(h: Tensor) -> tuple[float, ...]:
    """The entries at these shares of their number, rounded down: torch.quantile takes no more than 16 million."""
    ordered = h.sort().values
    places = [int(share * (len(ordered) - 1)) for share in QUANTILES]
    return tuple(ordered[torch.tensor(places, device=h.device)].tolist())


def _row(layer: Layer) -> tuple[str, ...]:
    numbers = (layer.trace, *layer.quantiles)
    shares = (layer.negative, layer.zero)
    return (
        layer.name,
        f"{layer.size:,}",
        *(f"{value:.3g}" for value in numbers),
        *(f"{share:.1%}" for share in shares),
        # a range of 0 times a negative trace would print as -0
        *(f"{layer.sensitivity[bits] + 0.0:.2g}" for bits in BITS),
    )
