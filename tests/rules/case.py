"""One row of the table of rule tests, and the inputs the rows are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Case:
    """A function whose graph holds ``node``, once; ``reference`` is the same for torch to differentiate twice."""

    def __init__(
        self,
        node: str,
        function: Callable[..., Any],
        *inputs: Any,
        reference: Callable[..., Any] | None = None,
        label: str = "",
    ) -> None:
        self.node = node
        self.function = function
        self.inputs = inputs
        self.reference = reference
        self.label = f"{node}-{label}" if label else node


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, none of them close to a kink at 0, ±½ or ±1."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for kink in (0.0, 0.5, 1.0):
        close = (values.abs() - kink).abs() < 1e-2
        values = torch.where(close, values + 0.03, values)
    return values.requires_grad_()


def between(low: float, high: float, *shape: int, seed: int = 0) -> Tensor:
    """Uniform numbers of an interval."""
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (low + (high - low) * values).requires_grad_()


def distinct(*shape: int, seed: int = 0) -> Tensor:
    """Numbers with gaps between them, so that no maximum is close to a tie."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return ((order.to(torch.float64) - count / 2) * 0.37 + 0.11).reshape(shape).requires_grad_()


def constant(values: Tensor) -> Tensor:
    """The same numbers as data: nothing is differentiated with respect to them."""
    return values.detach()
