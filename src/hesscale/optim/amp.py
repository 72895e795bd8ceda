"""Loss scaling: curvature carries the factor a GradScaler put on the loss, as gradients do, and must lose it too.

Whoever calls ``scaler.step(optimizer)`` says that gradients carry the scaler's factor, or did so before they were
unscaled. The same then holds for curvature, whatever else the loss was multiplied by. Torch hands the factor to
optimizers that ask for it, but not once gradients are unscaled; so the optimizer has to know the scaler.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler

UNKNOWN_SCALE = (
    "the gradients were unscaled but the curvature was not, and by which factor is not known here: call "
    "scaler.step(optimizer) of a torch.amp.GradScaler, or optimizer.unscale_(scaler) before the step"
)


def scaler_that_asks() -> GradScaler | None:
    """The GradScaler in whose ``step`` the caller's property is being read; None if somebody else reads it."""
    asking = sys._getframe(2).f_locals.get("self")
    return asking if isinstance(asking, GradScaler) else None


def divide(tensors: Iterable[Tensor], scale: Tensor | float) -> None:
    """Divides in place; rounded as GradScaler rounds."""
    for tensor in tensors:
        factor = torch.as_tensor(scale, device=tensor.device).double().reciprocal().float()
        tensor.mul_(factor)
