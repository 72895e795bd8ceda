"""What kind of function a node without a name computes, found out by pulling signed powers of two through it.

They multiply without rounding in every precision, so that what should be equal is equal, also in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from .calculus import pull, value_of
from .families import Curvatures


def separate_slopes(node: Any, like: Curvatures) -> Curvatures | None:
    """Jᵀ1 if every element of an input feeds one element of the outputs at most, as in element-wise functions.

    Then Jᵀa = c∘a up to the places of a, and c∘(c∘a²) = (c∘a)²; None if that does not hold. While tracing there is no
    telling: the slopes are then taken to be separate, and come out as nan where they are not.
    """
    slopes, doubts = pull(node, *[None if t is None else torch.ones_like(t) for t in like]), Doubts()
    for vectors in zip(*(_probes(t, i) for i, t in enumerate(like)), strict=True):
        squares = pull(node, *[None if v is None else v * v for v in vectors])
        for slope, square, once in zip(slopes, squares, pull(node, *vectors), strict=True):
            if (
                slope is not None
                and square is not None
                and once is not None
                and not doubts.settle(_equal(square * slope, once * once))
            ):
                return None
    return [doubts.marked(slope) for slope in slopes]


def diagonal_of(hessian: Callable[[Tensor], Tensor | None], like: Tensor) -> Tensor | None:
    """H1 if the matrix behind ``hessian(v)`` = Hv is diagonal; None if it is not, or nan while tracing."""
    total, doubts = hessian(torch.ones_like(like)), Doubts()
    if total is None:  # nothing depends on it
        return torch.zeros_like(like)
    for vector in _probes(like):
        assert vector is not None
        moved = hessian(vector)
        if not doubts.settle(_equal(total * vector, torch.zeros_like(like) if moved is None else moved)):
            return None
    return doubts.marked(total)


def _probes(like: Tensor | None, output: int = 0) -> Iterator[Tensor | None]:
    """Two vectors of ±2⁰ … ±2⁻⁴, in which no two of the first ten elements, and hardly any two others, are equal.

    Those of several outputs differ from each other, place by place.
    """
    if like is None:
        yield from (None, None)
        return
    places = torch.arange(like.numel(), device=like.device) + 3 * output
    for kind in (places % 10, _scattered(places) % 10):
        yield (torch.where(kind < 5, 1.0, -1.0) * torch.exp2(-(kind % 5).float())).to(like).reshape(like.shape)


def _scattered(places: Tensor) -> Tensor:
    """Numbers without a pattern, the same in every run: a generator could not be compiled."""
    mixed = places * 2654435761 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 2246822519 & 0xFFFFFFFF
    return mixed ^ mixed >> 13


def _equal(a: Tensor, b: Tensor) -> Tensor:
    largest = a.abs().max() if a.numel() else 0.0
    b = b.to(a.dtype)
    same = ((a - b).abs() <= 1e-3 * b.abs() + 1e-6 * largest) | (a == b) | (a.isnan() & b.isnan())
    return same.all()


@final
class Doubts:
    """Answers that are known at once, or, while tracing, in each run only."""

    def __init__(self) -> None:
        self._open: list[Tensor] = []

    def settle(self, answer: Tensor) -> bool:
        """The answer; yes as long as there is no telling."""
        value = value_of(answer)
        if value is None:
            self._open.append(answer)
        return value is None or bool(value)

    def marked(self, x: Tensor | None) -> Tensor | None:
        """x, or nan in runs in which an answer was no."""
        for answer in self._open:
            x = None if x is None else torch.where(answer, x, torch.nan)
        return x
