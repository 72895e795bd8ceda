"""One formula, as a loop over parameters (the reference), as foreach, and as one call of fast/native.cpp.

With m = EMA(g), and v the mean of the curvature h that ``scale`` names, over t steps and r refreshes:

    rms        v = √EMA(h²)     denominator  v / √(1 − β₂ʳ) + eps
    mean_abs   v = EMA(|h|)     denominator  v / (1 − β₂ʳ)  + eps
    mean       v = EMA(h)       denominator |v| / (1 − β₂ʳ) + eps

    p ← (1 − lr·weight_decay)·p − u        u = lr · m / (1 − β₁ᵗ) / denominator, clipped at ±lr·bound

Without a bound nothing is clipped. An entry whose v is exactly zero has no scale, and does not move: its denominator
counts as infinite. No square is held in v's own precision, where half of all numbers would have none:
v ← hypot(√β₂·v, √(1 − β₂)·h).
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..fast import native

SCALES = ("rms", "mean_abs", "mean")

Number = float | Tensor
Place = tuple[Mapping[str, Any], int]  # a parameter's group and its index there


class Formula(NamedTuple):
    """The hyper-parameters of one parameter group."""

    lr: Number
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: str
    eps_inside_root: bool
    bound: float | None
    maximize: bool
    form: str  # a key of FORMS


class Factors(NamedTuple):
    """What the formula makes of its hyper-parameters at one age; parameters of one group and age share it."""

    decay: Number  # 1 − lr·weight_decay
    step_size: Number  # lr / (1 − β₁ᵗ)
    correction: Number  # what v is divided by: 1 − β₂ʳ, or its root for rms
    limit: Number | None  # lr·bound: what no entry of u exceeds; None without a bound


class Slot(NamedTuple):
    """One parameter in one step. ``h`` is None where the average of curvature is not refreshed in this step."""

    place: Place
    formula: Formula
    factors: Factors
    p: Tensor
    g: Tensor
    h: Tensor | None
    m: Tensor
    v: Tensor
    state: dict[str, Any]  # what the optimizer keeps of this parameter
    narrow: Tensor | None  # in half precision, where p is a copy of it in single

    @property
    def parameter(self) -> Tensor:
        """The optimizer's own, of which p may be this process's part."""
        group, index = self.place
        parameter: Tensor = group["params"][index]
        return parameter


def factors(formula: Formula, steps: Number, refreshes: Number) -> Factors:
    """The factors after so many steps and refreshes, this one included."""
    correction: Number = 1 - formula.beta2**refreshes
    return Factors(
        decay=1 - formula.lr * formula.weight_decay,
        step_size=formula.lr / (1 - formula.beta1**steps),
        correction=correction**0.5 if formula.scale == "rms" else correction,
        limit=None if formula.bound is None else formula.lr * formula.bound,
    )


def metric(slot: Slot) -> Tensor:
    """c = |v|, without bias correction: the curvature that the trust region measures a step with."""
    v = slot.v.clone() if torch.is_grad_enabled() else slot.v  # a graph would keep v itself, which moves on
    return v.abs()


def _infinite_at_zero(c: Tensor) -> Tensor:
    threshold = torch.threshold if torch.is_grad_enabled() else torch.threshold_
    return threshold(c, 0.0, math.inf)


class Form(ABC):
    """A way to compute the step of some slots."""

    slots: Sequence[Slot]

    def tops(self) -> list[tuple[float, float]]:
        """The largest magnitudes in g and h of each slot, inf and nan among them; 0 for an h that is not there."""
        tensors = [x for slot in self.slots for x in (slot.g, slot.h) if x is not None and x.numel()]
        found = iter(_magnitudes(tensors))
        return [
            (next(found), next(found) if slot.h is not None else 0.0) if slot.g.numel() else (0.0, 0.0)
            for slot in self.slots
        ]

    @abstractmethod
    def move(self) -> None:
        """Moves averages and parameters by one step."""

    @abstractmethod
    def directions(self) -> list[Tensor]:
        """u of each slot, whose p stays where it is; the averages move."""


def _magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """max |x| of each, nan if there is one in x; in one sweep over each, and one transfer for all."""
    with torch.no_grad():
        ends = [end for x in tensors for end in torch.aminmax(x)]
        if {end.device.type for end in ends} - {"cpu"}:
            ends = [*torch.stack([end.to(ends[0].device, torch.float64) for end in ends]).cpu()]
    numbers = [end.item() for end in ends]
    return [low if math.isnan(low) else max(-low, high) for low, high in zip(numbers[::2], numbers[1::2], strict=True)]


def is_zero(x: Tensor) -> bool:
    """Whether x is zero throughout."""
    return x.numel() == 0 or _magnitudes([x]) == [0.0]


@dataclass
class Loop(Form):
    """The reference: one slot after the other. It can be differentiated."""

    slots: Sequence[Slot]

    def move(self) -> None:
        for slot in self.slots:
            if slot.formula.weight_decay:
                slot.p.mul_(slot.factors.decay)
            if slot.factors.limit is None:
                _move_freely(slot)
            else:
                slot.p.sub_(_direction(slot))

    def directions(self) -> list[Tensor]:
        return [_direction(slot) for slot in self.slots]


def _move_freely(slot: Slot) -> None:
    """p ← p − u without a bound, with torch's own rounding in Adam."""
    denominator, m, step_size = _average_and_denominator(slot), _kept(slot.m), slot.factors.step_size
    if isinstance(step_size, Tensor):  # addcdiv_ takes no tensor as its value
        slot.p.addcdiv_(m * -step_size, denominator)
    else:
        slot.p.addcdiv_(m, denominator, value=-step_size)


def _direction(slot: Slot) -> Tensor:
    denominator, step_size = _average_and_denominator(slot), slot.factors.step_size
    limit: Any = slot.factors.limit  # clamp takes two numbers or two tensors
    if limit is None:
        return step_size * _kept(slot.m) / denominator
    if torch.is_grad_enabled():
        return (_kept(slot.m) / denominator * step_size).clamp(-limit, limit)
    # in the memory of the denominator: fresh memory costs more than the arithmetic
    return torch.div(slot.m, denominator, out=denominator).mul_(step_size).clamp_(-limit, limit)


def _kept(m: Tensor) -> Tensor:
    """m, as a copy where a graph needs it later: m itself moves on."""
    return m.clone() if torch.is_grad_enabled() else m


def _average_and_denominator(slot: Slot) -> Tensor:
    formula, v, h = slot.formula, slot.v, slot.h
    slot.m.lerp_(-slot.g if formula.maximize else slot.g, 1 - formula.beta1)
    if h is not None and formula.scale == "rms":
        old, new = formula.beta2**0.5, (1 - formula.beta2) ** 0.5
        v.copy_(torch.hypot(v * old, h * new)) if torch.is_grad_enabled() else v.mul_(old).hypot_(h * new)
    elif h is not None:
        v.lerp_(h.abs() if formula.scale == "mean_abs" else h, 1 - formula.beta2)
    c = v / slot.factors.correction
    c = _infinite_at_zero(c.abs() if formula.scale == "mean" else c)
    return torch.hypot(c, c.new_tensor(formula.eps**0.5)) if formula.eps_inside_root else c.add_(formula.eps)


@dataclass
class Foreach(Form):
    """One call per operation for all slots of a kind."""

    slots: Sequence[Slot]

    def move(self) -> None:
        for alike in self._grouped():
            p, m = [slot.p for slot in alike], [slot.m for slot in alike]
            if alike[0].formula.weight_decay:
                torch._foreach_mul_(p, alike[0].factors.decay)
            if alike[0].formula.bound is not None:
                torch._foreach_sub_(p, _directions(alike))
                continue
            denominators = _denominators(alike)
            sizes: Any = [-slot.factors.step_size for slot in alike]
            if isinstance(sizes[0], Tensor):
                torch._foreach_addcdiv_(p, torch._foreach_mul(m, sizes), denominators)
            else:
                torch._foreach_addcdiv_(p, m, denominators, sizes)

    def directions(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for alike in self._grouped():
            found.update(zip(map(id, alike), _directions(alike), strict=True))
        return [found[id(slot)] for slot in self.slots]

    def _grouped(self) -> list[list[Slot]]:
        groups: dict[Any, list[Slot]] = {}
        for slot in self.slots:
            key = (id(slot.formula), slot.p.device, slot.p.dtype, slot.h is None)
            groups.setdefault(key, []).append(slot)
        return list(groups.values())


def _directions(slots: Sequence[Slot]) -> list[Tensor]:
    u = list(torch._foreach_div([slot.m for slot in slots], _denominators(slots)))
    sizes: Any = [slot.factors.step_size for slot in slots]
    torch._foreach_mul_(u, sizes)
    limit: Any = slots[0].factors.limit  # of one group, whatever their ages
    if isinstance(limit, Tensor):
        for entry in u:
            entry.clamp_(-limit, limit)
    elif limit is not None:
        torch._foreach_clamp_min_(u, -limit)
        torch._foreach_clamp_max_(u, limit)
    return u


def _denominators(slots: Sequence[Slot]) -> list[Tensor]:
    formula = slots[0].formula
    g, m, v = [slot.g for slot in slots], [slot.m for slot in slots], [slot.v for slot in slots]
    h = [slot.h for slot in slots if slot.h is not None]
    torch._foreach_lerp_(m, torch._foreach_neg(g) if formula.maximize else g, 1 - formula.beta1)
    if h and formula.scale == "rms":
        torch._foreach_mul_(v, formula.beta2**0.5)
        for entry, other in zip(v, torch._foreach_mul(h, (1 - formula.beta2) ** 0.5), strict=True):
            entry.hypot_(other)
    elif h:
        torch._foreach_lerp_(v, torch._foreach_abs(h) if formula.scale == "mean_abs" else h, 1 - formula.beta2)
    corrections: Any = [slot.factors.correction for slot in slots]
    c = list(torch._foreach_div(v, corrections))
    if formula.scale == "mean":
        torch._foreach_abs_(c)
    for entry in c:
        _infinite_at_zero(entry)
        if formula.eps_inside_root:
            entry.hypot_(entry.new_tensor(formula.eps**0.5))
    if not formula.eps_inside_root:
        torch._foreach_add_(c, formula.eps)
    return c


_NATIVE_SCALES = {("rms", False): 0, ("rms", True): 1, ("mean_abs", False): 2, ("mean", False): 3}


class Native(Form):
    """One call of fast/native.cpp for all slots, which must fit it."""

    def __init__(self, slots: Sequence[Slot], rows: Sequence[native.Row]) -> None:
        self.slots = slots
        self._rows = (native.Row * len(rows))(*rows)

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> tuple[Self | None, list[Slot]]:
        """As many of them as fit, and those that are left over."""
        if native.library() is None:
            return None, [*slots]
        fitting, rows, rest = [], [], []
        for slot in slots:
            row = _row(slot)
            if row is None:
                rest.append(slot)
            else:
                fitting.append(slot)
                rows.append(row)
        found = cls(fitting, rows) if rows else None
        return (None, [*slots]) if found is None or native.overlap(found._rows) else (found, rest)

    def tops(self) -> list[tuple[float, float]]:
        return native.look(self._rows)

    def move(self) -> None:
        self._run([slot.p for slot in self.slots])

    def directions(self) -> list[Tensor]:
        found = [torch.empty_like(slot.p, requires_grad=False) for slot in self.slots]
        for row, u in zip(self._rows, found, strict=True):
            row.u = u.data_ptr()
        self._run(found)
        return found

    def _run(self, moved: Sequence[Tensor]) -> None:
        changed = [*moved]
        for slot in self.slots:
            changed += (slot.m,) if slot.h is None else (slot.m, slot.v)
        torch.autograd.graph.increment_version(changed)  # autograd does not see what native.cpp does
        native.update(self._rows)


def _row(slot: Slot) -> native.Row | None:
    """The correction of v is moved to the step size and to eps, which leaves one division per entry.

    m·a / (v/k + eps)  =  m·ak / (v + eps·k)        m·a / √(v²/k² + eps)  =  m·ak / √(v² + eps·k²)
    """
    formula, (decay, step_size, k, limit) = slot.formula, slot.factors
    if isinstance(decay, Tensor) or isinstance(step_size, Tensor) or isinstance(k, Tensor) or isinstance(limit, Tensor):
        return None
    eps = formula.eps * (k * k if formula.eps_inside_root else k)
    averaging = (-1.0 if formula.maximize else 1.0, 1 - formula.beta1, formula.beta2, 1 - formula.beta2)
    return native.row(
        slot.p,
        slot.g,
        slot.h,
        slot.m,
        slot.v,
        scale=_NATIVE_SCALES[formula.scale, formula.eps_inside_root],
        numbers=(decay, *averaging, step_size * k, eps, math.inf if limit is None else limit),
    )


def _native_or(other: type[Loop | Foreach], slots: Sequence[Slot]) -> list[Form]:
    found, rest = Native.of(slots)
    forms: list[Form] = [] if found is None else [found]
    return [*forms, other(rest)] if rest else forms


def _fused(slots: Sequence[Slot]) -> list[Form]:
    if not all(slot.p.is_cpu for slot in slots) or native.library() is None:
        _warn_once()
    return _native_or(Foreach, slots)


@cache
def _warn_once() -> None:
    warnings.warn(
        "fused=True needs parameters on a CPU and a C++ compiler (set CXX, or install g++ or clang++): falling back to "
        "foreach, which makes the same steps more slowly",
        stacklevel=7,
    )


FORMS: dict[str, Callable[[Sequence[Slot]], list[Form]]] = {
    "loop": lambda slots: [Loop(slots)],
    "foreach": lambda slots: [Foreach(slots)],
    "default": partial(_native_or, Loop),  # of a CPU
    "fused": _fused,
}


def forms_of(slots: Sequence[Slot]) -> list[Form]:
    """All slots, each in the form that its group asks for, or the one that stands in for it."""
    chosen: dict[tuple[str, bool], list[Slot]] = {}
    for slot in slots:
        is_captured = isinstance(slot.factors.correction, Tensor)
        chosen.setdefault((slot.formula.form, is_captured), []).append(slot)
    return [form for (name, _), alike in chosen.items() for form in FORMS[name](alike)]
