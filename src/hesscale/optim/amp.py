"""Loss scaling: curvature carries the factor a GradScaler put on the loss, as gradients do, and must lose it too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

_UNKNOWN_SCALE = (
    "scaler.unscale_(optimizer) has unscaled the gradients but not the curvature, and by which factor is not known "
    "here: call optimizer.unscale_(scaler) instead, or optimizer.backward(scaler.scale(loss)) for the backward pass"
)


@final
class LossScale:
    """The factor on the loss of the step under way, as far as it is known before ``scaler.step``."""

    def __init__(self) -> None:
        self._seen: set[float] = set()

    def note(self, loss: Tensor) -> None:
        """Remembers the factor of a loss that has come straight out of ``scaler.scale``."""
        node: Any = loss.grad_fn
        if node is None or node.name() != "MulBackward0":
            return
        factor = node._saved_other
        # a GradScaler's factor is a float32 tensor without dimensions; one written as a number is saved as float64
        if factor is not None and factor.dim() == 0 and factor.dtype == torch.float32:
            self._seen.add(float(factor))

    def forget(self) -> None:
        """Starts over: curvature is consumed, or cleared."""
        self._seen = set()

    def resolve(self) -> None:
        """Notes that curvature has lost its factor already."""
        self._seen = {1.0}

    def left_on_curvature(self) -> float:
        """The factor still on curvature after the user has unscaled the gradients."""
        if len(self._seen) != 1:
            raise RuntimeError(_UNKNOWN_SCALE)
        return next(iter(self._seen))


def divide(tensors: Iterable[Tensor], scale: Tensor | float) -> None:
    """Divides in place; rounded as GradScaler rounds."""
    for tensor in tensors:
        factor = torch.as_tensor(scale, device=tensor.device).double().reciprocal().float()
        tensor.mul_(factor)
