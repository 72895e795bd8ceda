"""Diagonals by sampling: Hutchinson's probes of the Hessian, sampled targets for the Gauss-Newton matrix."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from .likelihood import Likelihood, recognized
from .passes import chunks, pulled_back, recorded, twice_differentiable
from .problem import Problem, output_tensors


def hutchinson(problem: Problem) -> Sequence[Tensor | None]:
    """The mean of v ∘ Hv over random signs v: unbiased for diag H (Bekas et al. 2007; AdaHessian, Yao et al. 2021).

    The variance at entry i is Σ_{j≠i} H_ij² / samples. AdaHessian takes |Hv| of one probe instead, which is biased.
    """
    outputs, extra = recorded(problem)
    loss = problem.loss(outputs)
    grads = torch.autograd.grad(loss, problem.tensors, create_graph=True, materialize_grads=True)
    results = [torch.zeros_like(p) for p in problem.tensors]
    size = sum(p.numel() for p in problem.tensors) + extra
    for start, stop in chunks(problem.samples, elements=size):
        probes = [_signs(stop - start, p, problem.generator) for p in problem.tensors]
        for result, v, hv in zip(results, probes, pulled_back(grads, problem.tensors, probes), strict=True):
            result += (v * hv).sum(0) / problem.samples
    return results


def _signs(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(2, (count, *like.shape), generator=generator, device=generator.device, dtype=like.dtype)
    return drawn.mul_(2).sub_(1).to(like.device)


def ggn_mc(problem: Problem) -> Sequence[Tensor | None]:
    """Σ_n (J_nᵀ r_n)², averaged over samples: unbiased for the Gauss-Newton diagonal (as BackPACK's DiagGGNMC).

    r_n is the gradient at example n's outputs with a target drawn from the model's own prediction, so scaled that
    E[r rᵀ] is the Hessian of the loss there (for a predicted variance: the Fisher information).
    """
    outputs, extra = recorded(problem)
    likelihood = recognized(problem, outputs)
    with twice_differentiable(problem.model):
        if _examples_apart(problem, outputs):
            return _by_example(problem, outputs, likelihood)
    return _by_mask(problem, likelihood, extra)


def _by_mask(problem: Problem, likelihood: Likelihood, extra: int) -> Sequence[Tensor]:
    """One pass per example and sample, with all other examples' r set to zero: right for every model."""
    results = [torch.zeros_like(p) for p in problem.tensors]
    draws = likelihood.draw(problem.samples, problem.generator)  # [samples, examples, ...] each
    count = draws[0].shape[1]
    size = sum(p.numel() for p in problem.tensors) + extra
    for start, stop in chunks(problem.samples * count, elements=size):
        places = torch.arange(start, stop, device=draws[0].device)
        vectors = [_only(draw, places // count, places % count) for draw in draws]
        for result, rows in zip(results, pulled_back(likelihood.predictions, problem.tensors, vectors), strict=True):
            result += rows.square().sum(0) / problem.samples
    return results


def _only(draw: Tensor, samples: Tensor, examples: Tensor) -> Tensor:
    """[k, *shape]: in row i nothing but sample i's values for example i."""
    kept = torch.zeros(len(samples), *draw.shape[1:], dtype=draw.dtype, device=draw.device)
    kept[torch.arange(len(samples), device=draw.device), examples] = draw[samples, examples]
    return kept


def _examples_apart(problem: Problem, outputs: Any) -> bool:
    """Whether the model treats examples one by one, so that vmap over them does with one pass what masks do with N."""
    x = problem.inputs
    if not (isinstance(x, Tensor) and isinstance(outputs, Tensor)) or len(x) != len(outputs) or len(x) == 1:
        return False
    state = _state(problem)

    def of_example(x: Tensor) -> Any:
        return functional_call(problem.model, state, (x.unsqueeze(0),)).squeeze(0)

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")  # vmap warns where it would loop
            alone = vmap(of_example)(x)
    except Exception:  # batch statistics, random masks, branches on data: each objects in its own way
        return False
    return alone.shape == outputs.shape and torch.allclose(alone, outputs, rtol=1e-3, atol=1e-5)


def _state(problem: Problem) -> dict[str, Tensor]:
    model = problem.model
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return buffers | {name: p.detach() for name, p in model.named_parameters()}


def _by_example(problem: Problem, outputs: Tensor, likelihood: Likelihood) -> Sequence[Tensor]:
    """One pass per sample: every example gets a copy of the parameters, and with it gradients of its own."""
    params = {name: p.detach() for name, p in problem.params.items()}
    state = _state(problem)

    def squares(x: Tensor, vectors: Tensor) -> dict[str, Tensor]:
        def output(own: dict[str, Tensor]) -> Any:
            return functional_call(problem.model, {**state, **own}, (x.unsqueeze(0),)).squeeze(0)

        pull = vjp(output, params)[1]
        (rows,) = vmap(pull)(vectors)
        return {name: row.square().sum(0) for name, row in rows.items()}

    draws = likelihood.draw(problem.samples, problem.generator)
    (vectors,) = pulled_back(likelihood.predictions, output_tensors(outputs), draws)
    results = {name: torch.zeros_like(p) for name, p in params.items()}
    size = problem.samples * sum(p.numel() for p in params.values())
    for start, stop in chunks(len(outputs), elements=size):
        found = vmap(squares, in_dims=(0, 1))(problem.inputs[start:stop], vectors[:, start:stop])
        for name, rows in found.items():
            results[name] += rows.sum(0) / problem.samples
    return list(results.values())
