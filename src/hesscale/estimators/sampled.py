"""Diagonals by sampling: Hutchinson's probes of the Hessian, sampled targets for the Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from ..columns import hutchinson as probes
from ..columns.sampled import sampled_gauss_newton
from ..double_backward import twice_differentiable
from .batched_vjp import chunks, recorded
from .problem import Problem

_EXAMPLES = 32
"""A batch that is usual: squares of its gradients are made that many at a time, at most (columns/squares.py)."""


def hutchinson(problem: Problem) -> Sequence[Tensor | None]:
    """The mean of v ∘ Hv over random signs v: unbiased for diag H (Bekas et al. 2007; AdaHessian, Yao et al. 2021).

    The variance at entry i is Σ_{j≠i} H_ij² / samples. AdaHessian takes |Hv| of one probe instead, which is biased.
    """
    with twice_differentiable(problem.model):
        outputs, extra = recorded(problem)
        return probes.hutchinson(
            problem.loss(outputs),
            problem.tensors,
            samples=problem.samples,
            at_once=_at_once(problem, extra),
            generator=problem.generator,
        )[1]


def _at_once(problem: Problem, extra: int, gradients: int = 1) -> int:
    """How many samples memory has room for, each of which needs so many gradients and ``extra`` numbers."""
    return next(chunks(problem.samples, elements=gradients * sum(p.numel() for p in problem.tensors) + extra))[1]


def ggn_mc(problem: Problem) -> Sequence[Tensor | None]:
    """Σ_n (J_nᵀ r_n)², averaged over samples: unbiased for the Gauss-Newton diagonal (as BackPACK's DiagGGNMC).

    r_n is the gradient at example n's outputs with a target drawn from the model's own prediction, so scaled that
    E[r rᵀ] is the Hessian of the loss there (for a predicted variance: the Fisher information).
    """
    # one pass at a time can go through fused kernels, several at once cannot
    with nullcontext() if problem.samples == 1 else twice_differentiable(problem.model):
        outputs, extra = recorded(problem)
        return sampled_gauss_newton(
            problem.loss(outputs),
            problem.tensors,
            samples=problem.samples,
            at_once=_at_once(problem, extra, gradients=_EXAMPLES),
            generator=problem.generator,
            apart=True,
        )
