"""What kind of function a node without a name computes, found out by pulling signed powers of two through it.

They multiply without rounding in every precision, so that what should be equal is equal, also in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .calculus import pull
from .families import Curvatures


def separate_slopes(node: Any, like: Curvatures) -> Curvatures | None:
    """Jᵀ1 if every element of an input feeds one element of the outputs at most, as in element-wise functions.

    Then Jᵀa = c∘a up to the places of a, and c∘(c∘a²) = (c∘a)²; None if that does not hold.
    """
    slopes = pull(node, *[None if t is None else torch.ones_like(t) for t in like])
    for vectors in zip(*(_probes(t, i) for i, t in enumerate(like)), strict=True):
        squares = pull(node, *[None if v is None else v * v for v in vectors])
        for slope, square, once in zip(slopes, squares, pull(node, *vectors), strict=True):
            if (
                slope is not None
                and square is not None
                and once is not None
                and not _equal(square * slope, once * once)
            ):
                return None
    return slopes


def diagonal_of(hessian: Callable[[Tensor], Tensor | None], like: Tensor) -> Tensor | None:
    """H1 if the matrix behind ``hessian(v)`` = Hv is diagonal; None if it is not."""
    total = hessian(torch.ones_like(like))
    if total is None:  # nothing depends on it
        return torch.zeros_like(like)
    for vector in _probes(like):
        assert vector is not None
        moved = hessian(vector)
        if not _equal(total * vector, torch.zeros_like(like) if moved is None else moved):
            return None
    return total


def _probes(like: Tensor | None, output: int = 0) -> Iterator[Tensor | None]:
    """Two vectors of ±2⁰ … ±2⁻⁴, in which no two of the first ten elements, and hardly any two others, are equal.

    Those of several outputs differ from each other, place by place.
    """
    if like is None:
        yield from (None, None)
        return
    generator = torch.Generator(like.device).manual_seed(output)
    count = like.numel()
    for kind in (
        (torch.arange(count, device=like.device) + 3 * output) % 10,
        torch.randint(10, (count,), generator=generator, device=like.device),
    ):
        yield (torch.where(kind < 5, 1.0, -1.0) * torch.exp2(-(kind % 5).float())).to(like).reshape(like.shape)


def _equal(a: Tensor, b: Tensor) -> bool:
    largest = float(a.abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b.to(a.dtype), rtol=1e-3, atol=1e-6 * largest, equal_nan=True)
