"""The leading eigenpairs of diag q − qqᵀ for probabilities q, without the matrix: O(classes) numbers for each pair.

For q_1 ≥ q_2 ≥ … with Σq = 1 the eigenvalue λ_j lies between q_{j+1} and q_j, where it solves the secular equation

    h(λ)  =  Σ_i q_i / (q_i − λ)  =  0        with eigenvector        v_i  ∝  q_i / (q_i − λ)

(1 − Σ q_i²/(q_i − λ) is −λ h(λ)). All of these differences keep their digits as long as λ is known by its distance from
the nearer of the two poles. Where q_j = q_{j+1}, λ is equal to both, and only the equal entries matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..traced import is_traced, value_of

_ELEMENTS = 2**16
"""Rows are solved this many numbers at a time, in double precision."""

_STEPS = 16
"""Seven are the most for usual probabilities, 13 for nearly equal ones. As many as these are traced."""

_DIGITS = 2e-15


class Root(NamedTuple):
    """λ = pole + offset, one for each row. Where two entries are equal the offset is 0."""

    pole: Tensor
    offset: Tensor


def leading_pairs(q: Tensor, rank: int) -> Iterator[Tensor]:
    """√λ_j v_j, [rows, classes], for j = 1 … ``rank``, all in the same memory. Zeros where λ_j = 0."""
    rank = min(rank, q.shape[-1] - 1)
    if rank < 1:
        return
    top, places = q.topk(rank + 1, -1)  # sorted
    result, parts = torch.empty_like(q), _parts(q)
    for j in range(rank):
        for rows in parts:
            result[rows] = _pair(q[rows].double(), top[rows].double(), places[rows], j)
        yield result


def _parts(q: Tensor) -> list[slice]:
    """The rows, some at a time; all at once while they are traced, since a compiler has its own parts."""
    step = max(_ELEMENTS // q.shape[-1], 1)
    return [slice(None)] if is_traced() else [slice(start, start + step) for start in range(0, len(q), step)]


def _pair(q: Tensor, top: Tensor, places: Tensor, j: int) -> Tensor:
    """√λ_j v_j for some rows."""
    high, low = top[:, j : j + 1], top[:, j + 1 : j + 2]
    equal = high == low
    root = _solved(q, high, low)
    v = q / _difference(q, root).where(~equal, 1.0)
    v = torch.where(equal, _contrast(q, top, places, j), v)
    v /= torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    value = (root.pole + root.offset).clamp_min(0)
    return v * value.sqrt() * (low > 0)  # with one entry less than that, λ_j is the eigenvalue 0


def _contrast(q: Tensor, top: Tensor, places: Tensor, j: int) -> Tensor:
    """e_s + … + e_j − m e_{j+1}, s to j + 1 being the places of one value, m of them before the last."""
    same = (top[:, : j + 1] == top[:, j + 1 : j + 2]).to(q.dtype)
    found = torch.zeros_like(q).scatter_(-1, places[:, : j + 1], same)
    return found.scatter_(-1, places[:, j + 1 : j + 2], -same.sum(-1, keepdim=True))


def _difference(q: Tensor, root: Root) -> Tensor:
    return (q - root.pole).sub_(root.offset)


def _solved(q: Tensor, high: Tensor, low: Tensor) -> Root:
    """The root of h between two neighboring poles; h grows from −∞ to ∞ there.

    Each step solves the equation with all terms above λ gathered at the pole ``high``, all below at ``low``, such that
    values and slopes agree (Bunch, Nielsen & Sorensen 1978): quadratic convergence. Bisection where that leaves the
    bracket.
    """
    gap = high - low
    safe = gap.where(gap > 0, 1.0)
    upper = (q / (q - low).sub_(safe / 2)).sum(
        -1, keepdim=True
    ) <= 0  # λ is in the upper half, and counted from ``high``
    pole = torch.where(upper, high, low)
    left, right = torch.where(upper, -safe / 2, 0.0), torch.where(upper, 0.0, safe / 2)
    offset = (left + right) / 2
    done = (gap <= 0) | (low <= 0)  # nobody asks for the others
    for _ in range(_STEPS):
        inverse = _difference(q, Root(pole, offset)).reciprocal_()
        below = (q * inverse).sum(-1, keepdim=True) < 0
        left, right = torch.where(below, offset, left), torch.where(below, right, offset)
        trial = _next(q, inverse, high, low, offset, upper)
        done |= (trial - offset).abs() <= _DIGITS * offset.abs()
        if value_of(done.all()):
            break
        trial = trial.where((trial > left) & (trial < right), (left + right) / 2)
        offset = offset.where(done, trial)
    return Root(pole, offset.where(gap > 0, 0.0))


def _next(q: Tensor, inverse: Tensor, high: Tensor, low: Tensor, offset: Tensor, upper: Tensor) -> Tensor:
    """The offset x with  c + s/(high − λ) + t/(low − λ) = 0,  as a root of c x² − b x + k.

    s gathers the slopes q/(q − λ)² of all terms above λ, t of those below, and c = Σ slope·(q − the pole it went to),
    all without a difference of large terms.
    """
    gap = high - low
    slopes = (q * inverse).mul_(inverse)
    above = slopes.where(inverse > 0, 0.0)
    rising, falling = above.sum(-1, keepdim=True), (slopes - above).sum(-1, keepdim=True)
    c = (slopes.mul_(q - torch.where(inverse > 0, high, low))).sum(-1, keepdim=True)
    s = rising * torch.where(upper, offset, gap - offset).square()
    t = falling * torch.where(upper, gap + offset, offset).square()
    b, k = s + t + torch.where(upper, -gap, gap) * c, torch.where(upper, -s, t) * gap
    root = (b.square() - 4 * c * k).clamp_min(0).sqrt()
    return torch.where(b >= 0, 2 * k / (b + root), (b - root) / (2 * c))
