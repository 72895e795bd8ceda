"""native.cpp, the formula written by hand: on the CPU, one call moves all parameters of a kind, on all of its cores.

It sees memory, not tensors. So tensors that it could misread, of whatever sort, are left to kernel.py.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from array import array
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..outer import factors_of
from .updates import Slot, coefficients

_DTYPES = (torch.float32, torch.float64)
_PLAIN = {Tensor, torch.nn.Parameter}
_SCALES = {("rms", False): 0, ("rms", True): 1, ("mean_abs", False): 2, ("mean", False): 3}
_H, _ROW, _WIDTH = 3, 8, 9  # columns of the table
_NOT_ZERO = 2  # what native.cpp sees where all is well
_FLAGS = () if sys.platform == "win32" else ("-ftree-loop-vectorize", "-fno-math-errno")
"""To take back two of torch's own: its generated code vectorizes by hand, this does not."""

_dtype, _layout, _shape, _is_cpu = map(attrgetter, ("dtype", "layout", "shape", "is_cpu"))


class Kind(NamedTuple):
    """What the slots of a batch have in common."""

    dtype: torch.dtype
    scale: str
    eps_inside_root: bool
    refresh: bool


class Batch(NamedTuple):
    """Slots of one kind, and the table that tells native.cpp where their tensors are."""

    kind: Kind
    slots: Sequence[Slot]
    table: array[int]


def gathered(slots: Sequence[Slot]) -> tuple[list[Batch], list[Slot]]:
    """Batches of the slots that native.cpp takes, and those that are left over."""
    kinds: dict[Any, list[Slot]] = {}
    rest = []
    for slot in slots:
        formula = slot.formula
        if formula.implementation == "fused" and not isinstance(slot.steps, Tensor):
            kind = (slot.p.dtype, formula.scale, formula.eps_inside_root, slot.h is not None)
            kinds.setdefault(kind, []).append(slot)
        else:
            rest.append(slot)
    batches = []
    for kind, alike in kinds.items():
        table = _table(alike)
        if table is None:  # find out whose fault it is
            unfit = {id(slot) for slot in alike if _table([slot]) is None}
            rest += [slot for slot in alike if id(slot) in unfit]
            alike = [slot for slot in alike if id(slot) not in unfit]
            table = _table(alike) if alike else None
        if table is not None:
            batches.append(Batch(Kind(*kind), alike, table))
    if batches and library() is None:
        return [], list(slots)
    return batches, rest


def suspicious(batch: Batch) -> list[Slot]:
    """The slots with an inf or a nan in g or h, or with zeros only in h (in g, where there is no h)."""
    seen = array("i", bytes(4 * len(batch.slots)))
    _library().hesscale_look(
        batch.kind.dtype == torch.float64,
        len(batch.slots),
        _address(batch.table),
        _address(seen),
        torch.get_num_threads(),
    )
    return [slot for slot, found in zip(batch.slots, seen, strict=True) if found != _NOT_ZERO]


def update(batch: Batch) -> None:
    """As ``update_by_loop`` of updates.py, and counts the step."""
    _run(batch, moving=True)


def directions(batch: Batch) -> list[Tensor]:
    """As ``directions_by_loop`` of updates.py, and counts the step."""
    found = [torch.empty_like(slot.p, requires_grad=False) for slot in batch.slots]
    batch.table[6 * len(found) : 7 * len(found)] = array("q", [u.data_ptr() for u in found])
    _run(batch, moving=False)
    return found


def _run(batch: Batch, *, moving: bool) -> None:
    kind, slots, table = batch
    changed = [slot.m for slot in slots]
    changed += [slot.p for slot in slots] if moving else []
    changed += [slot.v for slot in slots] if kind.refresh else []
    torch.autograd.graph.increment_version(changed)  # autograd does not see what native.cpp does
    numbers = array("d", chain.from_iterable(_coefficients(slots)))
    _library().hesscale_update(
        kind.dtype == torch.float64,
        _SCALES[kind.scale, kind.eps_inside_root],
        kind.refresh,
        moving,
        len(slots),
        _address(table),
        _address(numbers),
        torch.get_num_threads(),
    )


def _coefficients(slots: Sequence[Slot]) -> Iterator[tuple[float, ...]]:
    known: dict[tuple[Any, ...], tuple[float, ...]] = {}  # parameters of one group and one age share theirs
    for slot in slots:
        key = (id(slot.formula), slot.steps, slot.refreshes)
        if key not in known:
            known[key] = coefficients(slot)
        yield known[key]


def _table(slots: Sequence[Slot]) -> array[int] | None:
    """None unless all tensors are plain ones of one dtype, dense, and those of a slot have their entries in one order.

    Built by columns, since a step that is short meets its own code cold: few different things, each done in a row.
    """
    _, _, p, g, h, m, v, *_ = zip(*slots, strict=True)
    factors = {i: pair for i, entry in enumerate(h) if (pair := factors_of(entry)) is not None}
    if factors:
        if not all(_fit(*pair, p[i]) for i, pair in factors.items()):
            return None
        h = tuple(g[i] if i in factors else entry for i, entry in enumerate(h))  # all that is said of h below holds
    columns = (p, g, m, v) if h[0] is None else (p, g, h, m, v)
    tensors = [*chain.from_iterable(columns)]
    counts = [slot.state["step"] for slot in slots]
    if p[0].dtype not in _DTYPES or not _are_plain(tensors, p[0].dtype) or not _are_plain(counts, torch.float32):
        return None
    if h[0] is not None and {*map(_layout, h)} != {torch.strided}:  # sparse: the others have been seen to be dense
        return None
    if not _ordered_alike(columns, dense=all(map(Tensor.is_contiguous, tensors))):
        return None
    addresses = [*map(Tensor.data_ptr, tensors)]
    if 0 in addresses:  # no entries, or none that are written out
        return None
    count, nothing = len(slots), [0] * len(slots)
    table = array("q", map(Tensor.numel, p))
    table.extend(addresses[: 2 * count])
    table.extend(nothing if h[0] is None else addresses[2 * count : 3 * count])
    table.extend(addresses[-2 * count :])
    table.extend(nothing)  # u
    table.extend(map(Tensor.data_ptr, counts))
    table.extend(2 * nothing)  # row, width
    for i, (column, row) in factors.items():
        for place, value in ((_H, column.data_ptr()), (_ROW, row.data_ptr()), (_WIDTH, row.numel())):
            table[place * count + i] = value
    return table


def _fit(column: Tensor, row: Tensor, p: Tensor) -> bool:
    """Whether they are plain vectors, and their product has its entries in the order in which those of p lie."""
    is_ordered = all(map(Tensor.is_contiguous, (column, row, p))) and (column.numel(), row.numel()) == p.shape
    return is_ordered and _are_plain((column, row), p.dtype)


def _are_plain(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return _PLAIN.issuperset(map(type, tensors)) and all(map(_is_cpu, tensors)) and {*map(_dtype, tensors)} == {dtype}


def _ordered_alike(columns: Sequence[Sequence[Tensor]], *, dense: bool) -> bool:
    p, *others = columns
    shapes = [*map(_shape, p)]
    if any([*map(_shape, column)] != shapes for column in others):
        return False
    if dense:
        return True
    strides = [*map(Tensor.stride, p)]
    same = all([*map(Tensor.stride, column)] == strides for column in others)
    return same and all(a.is_contiguous() or a.is_contiguous(memory_format=torch.channels_last) for a in p)


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
