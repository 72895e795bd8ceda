"""The formula of updates.py as one kernel made by torch.compile: each parameter in a single pass over memory.

It serves what native.py does not: other devices, half precision, and steps that are captured. A kernel takes ``WIDTH``
parameters of any size at a time, seen as vectors, so that one compilation serves all networks.
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .updates import Slot, coefficients, directions_by_foreach, update_by_foreach

WIDTH = 8
"""More would save calls and cost compilation, which takes some tenths of a second for each."""

_NUMBERS = 7  # that a kernel is told of each parameter
_NO_COMPILER = (
    "fused=True needs a compiler for torch.compile, which failed here ({reason}): falling back to foreach, "
    "which makes the same steps more slowly"
)

Kernel = Callable[..., list[Tensor]]
Vectors = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]  # p, g, h, m, v


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    refresh: bool
    scale: str
    eps_inside_root: bool
    moving: bool  # p itself moves; otherwise u comes back and p stays


def update_by_kernel(slots: Sequence[Slot]) -> None:
    """As ``update_by_loop`` of updates.py."""
    rest = _run(slots, {}, moving=True)
    update_by_foreach(rest)


def directions_by_kernel(slots: Sequence[Slot]) -> list[Tensor]:
    """As ``directions_by_loop`` of updates.py."""
    found: dict[int, Tensor] = {}
    rest = _run(slots, found, moving=False)
    found.update(zip(map(id, rest), directions_by_foreach(rest), strict=True))
    return [found[id(slot)] for slot in slots]


def _run(slots: Sequence[Slot], found: dict[int, Tensor], *, moving: bool) -> list[Slot]:
    """Runs kernels where they fit, puts the u they give into ``found``, and returns the slots left over."""
    groups: dict[Variant, list[tuple[Slot, Vectors]]] = {}
    rest = []
    for slot in slots:
        vectors = _vectors(slot)
        variant = _variant(slot, moving)
        if vectors is None or _kernel(variant) is None:
            rest.append(slot)
        else:
            groups.setdefault(variant, []).append((slot, vectors))
    for variant, pairs in groups.items():
        for start in range(0, len(pairs), WIDTH):
            _run_some(variant, pairs[start : start + WIDTH], found)
    return rest


def _run_some(variant: Variant, pairs: Sequence[tuple[Slot, Vectors]], found: dict[int, Tensor]) -> None:
    kernel = _kernel(variant)
    assert kernel is not None
    padding = _made_up(variant)[len(pairs) :]
    vectors = [*(vectors for _, vectors in pairs), *padding]
    coefficients = _coefficients([slot for slot, _ in pairs], variant)
    for (slot, _), u in zip(pairs, kernel(vectors, coefficients, variant), strict=False):  # none for the padding
        found[id(slot)] = u.as_strided(slot.p.size(), slot.p.stride())


def _variant(slot: Slot, moving: bool) -> Variant:
    formula = slot.formula
    refresh = slot.h is not None
    return Variant(slot.p.device, slot.p.dtype, refresh, formula.scale, formula.eps_inside_root, moving)


def _vectors(slot: Slot) -> Vectors | None:
    """The slot's tensors as vectors over the same memory; None where the layouts differ or there is no vector."""
    p, g, h, m, v = slot.p.detach(), slot.g, slot.h, slot.m, slot.v
    dense = p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last)
    alike = all(tensor is None or tensor.stride() == p.stride() for tensor in (g, h, m, v))
    if p.numel() < 2 or not dense or not alike:  # torch.compile would specialize on sizes 0 and 1
        return None
    return _flat(p), _flat(g), None if h is None else _flat(h), _flat(m), _flat(v)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _coefficients(slots: Sequence[Slot], variant: Variant) -> Tensor:
    """One row of numbers per parameter, [WIDTH, _NUMBERS]."""
    rows = [coefficients(slot) for slot in slots]
    rows += [rows[0]] * (WIDTH - len(rows))
    dtype = torch.promote_types(variant.dtype, torch.float32)
    if not isinstance(slots[0].steps, Tensor):
        return torch.tensor(rows, dtype=dtype).to(variant.device, non_blocking=True)
    # capturable: nothing may be read back to the host
    numbers = [torch.as_tensor(number, dtype=dtype, device=variant.device) for row in rows for number in row]
    return torch.stack(numbers).view(WIDTH, -1)


@functools.cache
def _kernel(variant: Variant) -> Kernel | None:
    """The compiled kernel, tried out on made-up vectors; None, with a warning, where that fails."""
    # a code object of its own: torch.compile gives up on one that it has compiled too often
    formula = types.FunctionType(_formula.__code__.replace(), globals(), f"kernel_{variant.scale}")
    kernel: Kernel = torch.compile(formula, dynamic=True, fullgraph=True)
    dtype = torch.promote_types(variant.dtype, torch.float32)
    try:
        kernel(_made_up(variant), torch.ones(WIDTH, _NUMBERS, dtype=dtype, device=variant.device), variant)
    except Exception as error:  # whatever stops the compiler, the formula can do without it
        _warn_once(type(error).__name__)
        return None
    return kernel


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(_NO_COMPILER.format(reason=reason), stacklevel=2)


@functools.cache
def _made_up(variant: Variant) -> list[Vectors]:
    # all sizes differ, also from WIDTH: torch.compile would take equal ones for a rule
    vectors = []
    for size in range(2 * WIDTH, 3 * WIDTH):
        p, g, h, m, v = (torch.ones(size, dtype=variant.dtype, device=variant.device) for _ in range(5))
        vectors.append((p, g, h if variant.refresh else None, m, v))
    return vectors


def _formula(vectors: Sequence[Vectors], coefficients: Tensor, variant: Variant) -> list[Tensor]:
    found = []
    for (p, g, h, m, v), row in zip(vectors, coefficients.unbind(), strict=True):
        decay, sign, weight1, beta2, weight2, step_size, eps = row.unbind()
        m.copy_(m + (sign * g - m) * weight1)
        if h is not None:
            new = {"rms": h * h, "mean_abs": h.abs(), "mean": h}[variant.scale]
            v.copy_(v * beta2 + new * weight2)
        c = v.sqrt() if variant.scale == "rms" else v.abs()
        c = torch.where(c > 0, c, math.inf)
        u = step_size * m / ((c * c + eps).sqrt() if variant.eps_inside_root else c + eps)
        if variant.moving:
            p.copy_(p * decay - u)
        else:
            found.append(u)
    return found
