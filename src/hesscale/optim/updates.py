"""One formula, as a loop over parameters (the reference) and as foreach; native.py and kernel.py have it as kernels.

With m = EMA(g), and V the average of the curvature h that ``scale`` names, over t steps and r refreshes:

    rms        V = EMA(h²)      c = √V          denominator √(V / (1 − β₂ʳ)) + eps
    mean_abs   V = EMA(|h|)     c = V           denominator  V / (1 − β₂ʳ)  + eps
    mean       V = EMA(h)       c = |V|         denominator |V| / (1 − β₂ʳ) + eps

    p ← (1 − lr·weight_decay)·p − u        u = lr · m / (1 − β₁ᵗ) / denominator

An entry whose V is exactly zero has no scale, and does not move: its denominator counts as infinite.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

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
    maximize: bool
    implementation: str  # a key of IMPLEMENTATIONS in curvature_scaled.py


@final
class Floor:
    """A bound from below on the entries of one V, so that not every step has to look for zeros in it.

    A refresh lets an entry fall to β₂V, no lower. So what one look at V has found goes a long way, for as long as
    nobody else writes to V. Torch's count of its versions tells; what is written past it, by way of ``.data``, is not
    seen, here as elsewhere in torch.
    """

    __slots__ = ("_least", "_looks", "_seen", "_version")

    def __init__(self) -> None:
        self._least = 0.0
        self._looks = True
        self._seen: weakref.ref[Tensor] | None = None
        self._version = 0

    def begin(self, v: Tensor, factor: float) -> None:
        """Before V changes: its entries may fall to ``factor`` times what they are."""
        is_known = self._seen is not None and self._seen() is v and self._version == v._version
        self._seen = None  # until it has changed: a step may be interrupted
        least = self._least * factor if is_known else 0.0
        self._looks = least < _SMALLEST.get(v.dtype, math.inf)  # below it, rounding could reach zero
        self._least = math.inf if self._looks else least

    def is_above_zero(self, part: Tensor) -> bool:
        """Whether all entries of V, or of a part of it, are positive, once they have changed."""
        if not self._looks:
            return True
        least = float(part.amin())
        self._least = min(self._least, least if least > 0 else 0.0)  # nan is not above zero
        return least > 0

    def end(self, v: Tensor) -> None:
        """When V has changed, and all of its parts were asked about."""
        if not v.is_inference():  # those have no versions
            self._seen, self._version = weakref.ref(v), v._version


_SMALLEST = {dtype: torch.finfo(dtype).smallest_normal for dtype in (torch.float32, torch.float64)}


class Slot(NamedTuple):
    """One parameter in one step. ``h`` is None where the average of curvature is not refreshed in this step."""

    place: Place
    formula: Formula
    p: Tensor
    g: Tensor
    h: Tensor | None
    m: Tensor
    v: Tensor
    steps: Number  # this one included, as are the refreshes
    refreshes: Number
    state: dict[str, Any]  # what the optimizer keeps of this parameter
    floor: Floor  # of v

    @property
    def parameter(self) -> Tensor:
        """The optimizer's own: the whole of what p, g, h, m and v are this process's part of."""
        group, index = self.place
        parameter: Tensor = group["params"][index]
        return parameter

    @property
    def decay(self) -> Number:
        return 1 - self.formula.lr * self.formula.weight_decay

    @property
    def step_size(self) -> Number:
        """lr / (1 − β₁ᵗ)"""
        return self.formula.lr / (1 - self.formula.beta1**self.steps)

    @property
    def correction(self) -> Number:
        """What c is divided by: 1 − β₂ʳ, or its root for rms."""
        correction: Number = 1 - self.formula.beta2**self.refreshes
        return correction**0.5 if self.formula.scale == "rms" else correction


def update_by_loop(slots: Sequence[Slot]) -> None:
    """Moves each parameter by one step."""
    for slot in slots:
        if slot.formula.weight_decay:
            slot.p.mul_(slot.decay)
        denominator = _average_and_denominator(slot)
        m = slot.m.clone() if torch.is_grad_enabled() else slot.m  # differentiable: m moves on, the graph keeps its own
        step_size = slot.step_size
        if isinstance(step_size, Tensor):  # addcdiv_ takes no tensor as its value
            slot.p.addcdiv_(m, denominator / -step_size)
        else:
            slot.p.addcdiv_(m, denominator, value=-step_size)


def directions_by_loop(slots: Sequence[Slot]) -> list[Tensor]:
    """u of each parameter, which stays where it is; the averages move."""
    return [slot.step_size * slot.m / denominator for slot in slots for denominator in [_average_and_denominator(slot)]]


def coefficients(slot: Slot) -> tuple[Any, ...]:
    """What a kernel is told: 1 − lr·weight_decay, sign, 1 − β₁, β₂, 1 − β₂, step size, eps.

    The correction of c is moved to the step size and to eps, which leaves one division per element:

    m·a / (c/k + eps)  =  m·ak / (c + eps·k)        m·a / √(c²/k² + eps)  =  m·ak / √(c² + eps·k²)
    """
    formula, k = slot.formula, slot.correction
    sign = -1.0 if formula.maximize else 1.0
    weights = (1 - formula.beta1, formula.beta2, 1 - formula.beta2)
    eps = formula.eps * (k * k if formula.eps_inside_root else k)
    return slot.decay, sign, *weights, slot.step_size * k, eps


def metric(slot: Slot) -> Tensor:
    """c, without bias correction: the curvature that the trust region measures a step with."""
    return _positive(slot.v, slot.formula.scale)


def _positive(v: Tensor, scale: str) -> Tensor:
    if scale == "rms":
        return v.sqrt()
    return v.abs() if scale == "mean" else v.clone()


def _infinite_at_zero(c: Tensor) -> Tensor:
    threshold = torch.threshold if torch.is_grad_enabled() else torch.threshold_
    return threshold(c, 0.0, math.inf)


def _average_and_denominator(slot: Slot) -> Tensor:
    formula, v, h = slot.formula, slot.v, slot.h
    slot.m.lerp_(-slot.g if formula.maximize else slot.g, 1 - formula.beta1)
    if h is not None and formula.scale == "rms":
        v.mul_(formula.beta2).addcmul_(h, h, value=1 - formula.beta2)
    elif h is not None:
        v.lerp_(h.abs() if formula.scale == "mean_abs" else h, 1 - formula.beta2)
    c = _infinite_at_zero(_positive(v, formula.scale))
    c = c / slot.correction if torch.is_grad_enabled() else c.div_(slot.correction)  # a graph keeps what a root gave
    return c.square_().add_(formula.eps).sqrt_() if formula.eps_inside_root else c.add_(formula.eps)


def update_by_foreach(slots: Sequence[Slot]) -> None:
    """As ``update_by_loop``, with one call per operation for all parameters of a kind."""
    for alike in _grouped(slots):
        p = [slot.p for slot in alike]
        if alike[0].formula.weight_decay:
            torch._foreach_mul_(p, alike[0].decay)
        denominators = _foreach_denominators(alike)
        m = [slot.m for slot in alike]
        sizes: Any = [-slot.step_size for slot in alike]
        if isinstance(sizes[0], Tensor):
            torch._foreach_div_(denominators, sizes)
            torch._foreach_addcdiv_(p, m, denominators)
        else:
            torch._foreach_addcdiv_(p, m, denominators, sizes)


def directions_by_foreach(slots: Sequence[Slot]) -> list[Tensor]:
    """As ``directions_by_loop``, with one call per operation for all parameters of a kind."""
    found: dict[int, Tensor] = {}
    for alike in _grouped(slots):
        u = torch._foreach_div([slot.m for slot in alike], _foreach_denominators(alike))
        sizes: Any = [slot.step_size for slot in alike]
        torch._foreach_mul_(u, sizes)
        found.update(zip(map(id, alike), u, strict=True))
    return [found[id(slot)] for slot in slots]


def _grouped(slots: Sequence[Slot]) -> list[list[Slot]]:
    groups: dict[Any, list[Slot]] = {}
    for slot in slots:
        key = (id(slot.formula), slot.p.device, slot.p.dtype, slot.h is None)
        groups.setdefault(key, []).append(slot)
    return list(groups.values())


def _foreach_denominators(slots: Sequence[Slot]) -> list[Tensor]:
    formula = slots[0].formula
    g, m, v = [slot.g for slot in slots], [slot.m for slot in slots], [slot.v for slot in slots]
    h = [slot.h for slot in slots if slot.h is not None]
    torch._foreach_lerp_(m, torch._foreach_neg(g) if formula.maximize else g, 1 - formula.beta1)
    if h and formula.scale == "rms":
        torch._foreach_mul_(v, formula.beta2)
        torch._foreach_addcmul_(v, h, h, value=1 - formula.beta2)
    elif h:
        torch._foreach_lerp_(v, torch._foreach_abs(h) if formula.scale == "mean_abs" else h, 1 - formula.beta2)
    c = list(torch._foreach_sqrt(v) if formula.scale == "rms" else torch._foreach_abs(v))
    for entry in c:
        _infinite_at_zero(entry)
    corrections: Any = [slot.correction for slot in slots]
    torch._foreach_div_(c, corrections)
    if formula.eps_inside_root:
        torch._foreach_mul_(c, c)
    torch._foreach_add_(c, formula.eps)
    if formula.eps_inside_root:
        torch._foreach_sqrt_(c)
    return c
