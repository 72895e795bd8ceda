"""Estimates from one backward pass: the three walks of ``hesscale.backward``, and the squared gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..backward import diagonal
from ..graph import wide
from .cut import noted, predictions
from .problem import Problem


def hesscale(problem: Problem) -> Sequence[Tensor | None]:
    """HesScale (Elsayed & Mahmood 2022): transport and residual at every node, with ``rank`` columns of the loss."""
    loss = problem.loss(problem.outputs())
    return diagonal(loss, problem.tensors, method="hesscale", rank=problem.rank, generator=problem.generator)


def hesscale_gn(problem: Problem) -> Sequence[Tensor | None]:
    """HesScaleGN: transport everywhere, the residual only in the loss, which begins at the model's output.

    Or behind the log-softmax that the model ends in, if the loss is linear in its output.
    """
    outputs = problem.outputs()
    ends = noted(outputs)
    loss = problem.loss(outputs)
    borders = [GradientEdge(*edge) for edge in predictions(loss, ends)]
    return diagonal(
        loss,
        problem.tensors,
        method="hesscale_gn",
        output=borders,
        rank=problem.rank,
        generator=problem.generator,
    )


def bl89(problem: Problem) -> Sequence[Tensor | None]:
    """Becker & LeCun (1989): HesScale with softmax taken for an element-wise function."""
    return diagonal(problem.loss(problem.outputs()), problem.tensors, method="bl89")


def squared_gradient(problem: Problem) -> Sequence[Tensor | None]:
    """(∂L/∂p)² of the batch's loss, what Adam keeps an average of."""
    grads = torch.autograd.grad(problem.loss(problem.outputs()), problem.tensors, allow_unused=True)
    return [None if grad is None else grad.to(wide(grad.dtype)).square() for grad in grads]
