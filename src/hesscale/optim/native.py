"""native.cpp, the formula written by hand: on the CPU, one call moves all parameters of a kind, on all of its cores.

It sees memory, not tensors. So tensors that it could misread, of whatever sort, are left to kernel.py.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from array import array
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from .updates import Slot, coefficients

_DTYPES = (torch.float32, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)
_SCALES = {("rms", False): 0, ("rms", True): 1, ("mean_abs", False): 2, ("mean", False): 3}
_COLUMNS = 7  # of a row: size, p, g, h, m, v, u
_NOT_ZERO = 2  # what native.cpp sees in a row where all is well
_FLAGS = () if sys.platform == "win32" else ("-ftree-loop-vectorize", "-fno-math-errno")
"""To take back two of torch's own: its generated code vectorizes by hand, this does not."""


class Kind(NamedTuple):
    """What the slots of a batch have in common."""

    dtype: torch.dtype
    scale: str
    eps_inside_root: bool
    refresh: bool


class Batch(NamedTuple):
    """Slots of one kind, and the rows that tell native.cpp where their tensors are."""

    kind: Kind
    slots: list[Slot]
    rows: array[int]


def gathered(slots: Sequence[Slot]) -> tuple[list[Batch], list[Slot]]:
    """Batches of the slots that native.cpp takes, and those that are left over."""
    batches: dict[Kind, Batch] = {}
    rest = []
    for slot in slots:
        formula = slot.formula
        row = _row(slot) if formula.implementation == "fused" else None
        if row is None:
            rest.append(slot)
            continue
        kind = Kind(slot.p.dtype, formula.scale, formula.eps_inside_root, slot.h is not None)
        if kind not in batches:
            batches[kind] = Batch(kind, [], array("q"))
        batches[kind].slots.append(slot)
        batches[kind].rows.extend(row)
    if batches and library() is None:
        return [], list(slots)
    return list(batches.values()), rest


def suspicious(batch: Batch) -> list[Slot]:
    """The slots with an inf or a nan in g or h, or with zeros only in h (in g, where there is no h)."""
    seen = array("i", bytes(4 * len(batch.slots)))
    _library().hesscale_look(
        batch.kind.dtype == torch.float64,
        len(batch.slots),
        _address(batch.rows),
        _address(seen),
        torch.get_num_threads(),
    )
    return [slot for slot, found in zip(batch.slots, seen, strict=True) if found != _NOT_ZERO]


def update(batch: Batch) -> None:
    """As ``update_by_loop`` of updates.py."""
    _run(batch, moving=True)


def directions(batch: Batch) -> list[Tensor]:
    """As ``directions_by_loop`` of updates.py."""
    found = [torch.empty_like(slot.p, requires_grad=False) for slot in batch.slots]
    batch.rows[_COLUMNS - 1 :: _COLUMNS] = array("q", [u.data_ptr() for u in found])
    _run(batch, moving=False)
    return found


def _run(batch: Batch, *, moving: bool) -> None:
    kind, slots, rows = batch
    changed = [slot.m for slot in slots]
    changed += [slot.p for slot in slots] if moving else []
    changed += [slot.v for slot in slots] if kind.refresh else []
    torch.autograd.graph.increment_version(changed)  # autograd does not see what native.cpp does
    numbers = array("d", [number for slot in slots for number in coefficients(slot)])
    _library().hesscale_update(
        kind.dtype == torch.float64,
        _SCALES[kind.scale, kind.eps_inside_root],
        kind.refresh,
        moving,
        len(slots),
        _address(rows),
        _address(numbers),
        torch.get_num_threads(),
    )


def _row(slot: Slot) -> tuple[int, ...] | None:
    """None unless all tensors are plain ones, of one dtype and dense, with their entries in the same order."""
    p, g, h, m, v = slot.p, slot.g, slot.h, slot.m, slot.v
    dtype, shape = p.dtype, p.shape
    if dtype not in _DTYPES or isinstance(slot.steps, Tensor):
        return None
    dense = True
    for tensor in (p, g, m, v) if h is None else (p, g, h, m, v):
        alike = tensor.dtype is dtype and tensor.shape == shape
        if not alike or type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        dense = dense and tensor.is_contiguous()
    if not dense and not _ordered_alike(slot):
        return None
    at = p.data_ptr(), g.data_ptr(), 0 if h is None else h.data_ptr(), m.data_ptr(), v.data_ptr()
    return (p.numel(), *at, 0) if at[0] else None  # nothing to do where there are no entries


def _ordered_alike(slot: Slot) -> bool:
    others = (slot.g, slot.m, slot.v) if slot.h is None else (slot.g, slot.h, slot.m, slot.v)
    dense = slot.p.is_contiguous(memory_format=torch.channels_last)
    return dense and all(tensor.stride() == slot.p.stride() for tensor in others)


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None  # there would be no batch
    return found


@functools.cache
def library() -> ctypes.CDLL | None:
    """native.cpp, compiled once and kept on disk by torch; None where that fails."""
    number, address = ctypes.c_int64, ctypes.c_void_p
    try:
        from torch._inductor.codecache import CppCodeCache  # takes a second, which only those who need it should pay

        source = resources.files(__package__).joinpath("native.cpp").read_text(encoding="utf-8")
        found: ctypes.CDLL = CppCodeCache.load(source, extra_flags=_FLAGS)
        found.hesscale_look.argtypes = [number, number, address, address, number]
        found.hesscale_update.argtypes = [number, number, number, number, number, address, address, number]
        found.hesscale_look.restype = found.hesscale_update.restype = None
    except Exception:  # whatever stops the compiler, kernel.py knows what to do, and what to say
        return None
    return found
