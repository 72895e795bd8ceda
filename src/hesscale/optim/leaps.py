"""A step that throws a parameter far beyond itself: found by norms before and after, in some steps without a bound."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import name_of
from .updates import Slot

FACTOR = 10.0
"""A leap moves a parameter by more than so many times its own norm, and so many times the length of lr per entry."""

FIRST = 10
"""So many steps are watched all; later, one in so many: what is looked at costs two more sweeps over it."""

_LEAP = (
    "a step took the norm of {name} from {before:.3g} to {after:.3g}: its curvature is near zero, and nothing bounds "
    "the step there. Train with bound=1, or a smaller lr"
)


def watched(slots: Sequence[Slot]) -> list[Slot]:
    """The slots that could leap: those with a bound up to ``FACTOR`` cannot. Nobody looks at what is captured."""
    return [
        slot
        for slot in slots
        if (slot.formula.bound is None or slot.formula.bound > FACTOR)
        and not isinstance(slot.factors.correction, Tensor)
    ]


def norms(slots: Sequence[Slot]) -> list[float]:
    """‖p‖ of each."""
    if not slots:
        return []
    with torch.no_grad():
        found = torch._foreach_norm([slot.p for slot in slots])
        return [x.item() for x in found]


def first_leap(slots: Sequence[Slot], before: Sequence[float]) -> str | None:
    """A sentence about the first slot that leapt since its norm was as ``before``.

    ‖p′‖ > (1 + F)·‖p‖ makes sure of ‖p′ − p‖ > F·‖p‖. What begins near zero may grow as fast as it would with Adam.
    """
    for slot, old, new in zip(slots, before, norms(slots), strict=True):
        adams = float(torch.as_tensor(slot.formula.lr).detach()) * slot.p.numel() ** 0.5
        if old > 0.0 and new > (1 + FACTOR) * old and new - old > FACTOR * adams:
            return _LEAP.format(name=name_of(slot.place), before=old, after=new)
    return None
