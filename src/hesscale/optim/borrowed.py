"""The formula through torch's own fused Adam: the default on the CPU. It needs no compiler, and half the loop's time.

Torch's kernel averages g², which is not wanted here. But its AMSGrad form divides by the larger of two averages: if the
one that it makes itself begins at −∞, it stays there, and the other one is the average of curvature.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .updates import Slot, update_by_loop

PIECE = 1 << 18
"""Entries that are moved at a time: few enough for the cache, since averages are swept over several times."""

_DTYPES = (torch.float32, torch.float64)
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def update_by_borrowed(slots: Sequence[Slot]) -> None:
    """As ``update_by_loop`` of updates.py, for gradients whose squares are finite: −∞ + g² must stay −∞."""
    fitting: list[Slot] = []
    others: list[Slot] = []
    for slot in slots:
        (fitting if _fits(slot) else others).append(slot)
    for batch in _batches([piece for slot in fitting for piece in _pieces(slot)]):
        _update(batch)
    update_by_loop(others)


def _fits(slot: Slot) -> bool:
    _, formula, p, g, h, m, v, steps, *_ = slot
    return (
        p.dtype in _DTYPES
        and formula.scale == "rms"
        and formula.beta2 > 0  # 0·∞ is not a number
        and not formula.eps_inside_root
        and not isinstance(steps, Tensor)
        and _PLAIN.issuperset(map(type, (p, g, h, m, v)))
        and p.is_cpu
        and p.is_contiguous()
        and g.is_contiguous()
        and m.is_contiguous()
        and v.is_contiguous()
        and (h is None or h.is_contiguous())
        and p.numel() > 0
    )


def _pieces(slot: Slot) -> Iterator[Slot]:
    if slot.p.numel() <= PIECE:
        yield slot
        return
    p, g, m, v = (tensor.view(-1).split(PIECE) for tensor in (slot.p, slot.g, slot.m, slot.v))
    h = [None] * len(p) if slot.h is None else slot.h.view(-1).split(PIECE)
    for parts in zip(p, g, h, m, v, strict=True):
        yield slot._replace(**dict(zip("pghmv", parts, strict=True)))


def _batches(pieces: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Pieces of one kind that follow each other, until there are ``PIECE`` entries or more."""
    batch: list[Slot] = []
    size, kind = 0, None
    for piece in pieces:
        this = (id(piece.formula), piece.p.dtype, piece.steps, piece.refreshes, piece.h is None)
        if batch and (this != kind or size >= PIECE):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size, kind = size + piece.p.numel(), this
    if batch:
        yield batch


def _update(slots: Sequence[Slot]) -> None:
    beta2, v = slots[0].formula.beta2, [slot.v for slot in slots]
    h = [slot.h for slot in slots if slot.h is not None]
    if h:
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, h, h, value=1 - beta2)
    # an entry without curvature must not move, of which torch's kernel knows nothing
    smallest = [*map(float, map(Tensor.amin, v))]
    if min(smallest) > 0:
        _move(slots)
        return
    _move([slot for slot, least in zip(slots, smallest, strict=True) if least > 0])
    update_by_loop([slot._replace(h=None) for slot, least in zip(slots, smallest, strict=True) if not least > 0])


def _move(slots: Sequence[Slot]) -> None:
    if not slots:
        return
    formula, steps, refreshes = slots[0].formula, slots[0].steps, slots[0].refreshes
    # the kernel has one count for both averages: the difference is made up for by lr, and that by weight_decay
    lr: Any = formula.lr if steps == refreshes else slots[0].step_size * (1 - formula.beta1**refreshes)
    torch._fused_adamw_(
        [slot.p for slot in slots],
        [slot.g for slot in slots],
        [slot.m for slot in slots],
        [_minus_infinity(slot.p.dtype, slot.p.shape) for slot in slots],
        [slot.v for slot in slots],
        [torch.tensor(float(refreshes))] * len(slots),
        lr=lr,
        beta1=formula.beta1,
        beta2=formula.beta2,
        weight_decay=formula.weight_decay * float(formula.lr) / lr if lr else 0.0,
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
