"""The formula through torch's own fused Adam: the default on the CPU. No compiler is needed; faster than the loop.

Torch's kernel averages g², which is not wanted here. But its AMSGrad form divides by the larger of two averages: if the
one that it makes itself begins at −∞, it stays there, and the other one is the average of curvature.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from ..outer import factors_of
from .updates import Slot, update_by_loop

PIECE = 1 << 18
"""Entries that are moved at a time: few enough for the cache, since averages are swept over several times."""

_DTYPES = ({torch.float32}, {torch.float64})
_PLAIN, _NUMBERS = {Tensor, torch.nn.Parameter}, {int, float}
_SIMILAR = 1e-6
_dtype, _is_cpu = attrgetter("dtype"), attrgetter("is_cpu")


def update_by_borrowed(slots: Sequence[Slot]) -> None:
    """As ``update_by_loop`` of updates.py, for gradients whose squares are finite: −∞ + g² must stay −∞."""
    fitting = slots if slots and _fit(slots) else [slot for slot in slots if _fit([slot])]
    for slot in fitting:
        slot.floor.begin(slot.v, 1.0 if slot.h is None else slot.formula.beta2)
    whole = [slot for slot in fitting if factors_of(slot.h) is None]
    refreshed = (
        _refreshed(slot, *pair) for slot in fitting if (pair := factors_of(slot.h))
    )  # each right before it moves
    for batch in chain(_batches(refreshed), _batches(whole)):
        _update(batch)
    for slot in fitting:
        slot.floor.end(slot.v)
    if len(fitting) < len(slots):
        update_by_loop([slot for slot in slots if not _fit([slot])])


def _fit(slots: Sequence[Slot]) -> bool:
    """Whether torch's kernel can take them; looked at by columns, since few of them is what most networks have."""
    _, formulas, p, g, h, m, v, steps, *_ = zip(*slots, strict=True)
    tensors = [*p, *g, *m, *v, *chain.from_iterable(factors_of(x) or (x,) for x in h if x is not None)]
    return (
        all(f.scale == "rms" and f.beta2 > 0 and not f.eps_inside_root for f in {*formulas})  # 0·∞ is not a number
        and _NUMBERS.issuperset(map(type, steps))
        and _PLAIN.issuperset(map(type, tensors))
        and all(map(_is_cpu, tensors))
        and {*map(_dtype, tensors)} in _DTYPES
        and all(map(Tensor.is_contiguous, tensors))
        and 0 not in map(Tensor.numel, p)
    )


def _refreshed(slot: Slot, column: Tensor, row: Tensor) -> Slot:
    """V ← β₂V + (1 − β₂)(c ⊗ r)², in one sweep and without c ⊗ r; the slot that is left has had its curvature."""
    beta2 = slot.formula.beta2
    column, row = _balanced(column, row)
    slot.v.addr_(column.square(), row.square(), beta=beta2, alpha=1 - beta2)
    return slot._replace(h=None)


def _balanced(column: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with factors of similar size: then no square of theirs leaves the range of numbers before V."""
    a, b = (float(torch.dot(factor, factor)) for factor in (column, row))
    if _SIMILAR < a / b < 1 / _SIMILAR:
        return column, row
    ratio = (b / a) ** 0.25
    return column * ratio, row / ratio


def _batches(slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """Pieces of one kind that follow each other, until there are ``PIECE`` entries or more."""
    batch: list[Slot] = []
    size, kind = 0, None
    for slot in slots:
        this = (slot.formula, slot.p.dtype, slot.steps, slot.refreshes, slot.h is None)
        for piece in (slot,) if slot.p.numel() <= PIECE else _pieces(slot):
            if batch and this != kind:
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size, kind = size + piece.p.numel(), this
            if size >= PIECE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(slot: Slot) -> Iterator[Slot]:
    p, g, m, v = (tensor.view(-1).split(PIECE) for tensor in (slot.p, slot.g, slot.m, slot.v))
    h = [None] * len(p) if slot.h is None else slot.h.view(-1).split(PIECE)
    for parts in zip(p, g, h, m, v, strict=True):
        yield slot._replace(**dict(zip("pghmv", parts, strict=True)))


def _update(slots: Sequence[Slot]) -> None:
    _, formulas, _, _, h, _, v, *_ = zip(*slots, strict=True)
    if h[0] is not None:
        torch._foreach_mul_(v, formulas[0].beta2)
        torch._foreach_addcmul_(v, h, h, value=1 - formulas[0].beta2)
    # an entry without curvature must not move, of which torch's kernel knows nothing
    curved: list[Slot] = []
    flat: list[Slot] = []
    for slot in slots:
        (curved if slot.floor.is_above_zero(slot.v) else flat).append(slot)
    if curved:
        _move(curved)
    update_by_loop([slot._replace(h=None) for slot in flat])


def _move(slots: Sequence[Slot]) -> None:
    _, formulas, p, g, _, m, v, all_steps, all_refreshes, *_ = zip(*slots, strict=True)
    formula, steps, refreshes = formulas[0], all_steps[0], all_refreshes[0]
    # the kernel has one count for both averages: the difference is made up for by lr, and that by weight_decay
    lr = formula.lr if steps == refreshes else slots[0].step_size * (1 - formula.beta1**refreshes)
    torch._fused_adamw_(
        p,
        g,
        m,
        [_minus_infinity(tensor.dtype, tensor.shape) for tensor in p],
        v,
        [torch.tensor(float(refreshes))] * len(p),
        lr=lr,
        beta1=formula.beta1,
        beta2=formula.beta2,
        weight_decay=formula.weight_decay * formula.lr / lr if lr else 0.0,
        eps=formula.eps,
        amsgrad=True,
        maximize=formula.maximize,
    )


@functools.cache
def _minus_infinities(dtype: torch.dtype) -> Tensor:
    return torch.full((PIECE,), -math.inf, dtype=dtype)


@functools.lru_cache(maxsize=256)
def _minus_infinity(dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return _minus_infinities(dtype)[: shape.numel()].view(shape)
