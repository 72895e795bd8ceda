"""Checks to run on rules and estimates of one's own: against second derivatives that torch computes exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .backward import diagonal
from .columns.dial import Rank
from .double_backward import refuse_wrong_derivatives, unfused
from .double_backward import twice_differentiable as twice_differentiable
from .estimators.problem import loss_of, outputs, without_traces
from .recomputing import recomputed_once


@recomputed_once()
def exact_diagonal(y: Tensor, inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The exact diagonal of the Hessian of a scalar ``y`` at each of ``inputs``, by one double backward per entry.

    Same arguments as ``hesscale.diagonal``, for networks of some thousand parameters. The graph is kept.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hesscale.testing.exact_diagonal(w.prod() ** 2, w)
    (tensor([8., 2.]),)
    """
    refuse_wrong_derivatives(y)
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    grads = torch.autograd.grad(y, inputs, create_graph=True, allow_unused=True)
    return tuple(_diagonal_of(grad, x) for grad, x in zip(grads, inputs, strict=True))


def _diagonal_of(grad: Tensor | None, x: Tensor) -> Tensor:
    result = torch.zeros_like(x, memory_format=torch.contiguous_format, requires_grad=False)
    if grad is None or not grad.requires_grad:
        return result
    for i, entry in enumerate(grad.reshape(-1)):
        (row,) = torch.autograd.grad(entry, x, retain_graph=True, allow_unused=True)
        if row is not None:
            result.view(-1)[i] = row.reshape(-1)[i]
    return result


def check_rule(
    function: Callable[..., Any],
    *inputs: Any,
    reference: Callable[..., Any] | None = None,
    method: str = "hesscale",
    tolerance: float = 1e-10,
    seed: int = 0,
) -> None:
    """Raises AssertionError unless the curvature of ``function(*inputs)`` is exact whenever the Hessian at its output
    is diagonal, as it is for every single node with a right rule.

    With random g, and s random or zero, it compares the diagonal of ``L(x) = Σ g·(f(x) − y₀) + ½ Σ s·(f(x) − y₀)²`` at
    every input that requires grad with ``exact_diagonal``. Give float64 inputs, away from kinks. ``reference`` computes
    the same as ``function`` in other operations, for one that torch cannot differentiate twice.

    >>> x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    >>> hesscale.testing.check_rule(F.softplus, x)
    """
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise ValueError("at least one input must be a tensor that requires grad")
    y = _joined(function(*inputs))
    generator = torch.Generator().manual_seed(seed)
    g, s = (torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device) for _ in range(2))
    twin = y if reference is None else _joined(reference(*inputs))
    torch.testing.assert_close(twin, y, msg=lambda text: f"function and reference differ: {text}")
    offset = twin - twin.detach()
    linear, square = (g * offset).sum(), (s * offset.square()).sum() / 2
    for curvature, loss in ((None, linear), (s, linear + square)):
        found = diagonal(y, leaves, g, curvature, method=method, retain_graph=True)
        for index, (ours, exact) in enumerate(zip(found, exact_diagonal(loss, leaves), strict=True)):
            torch.testing.assert_close(
                torch.zeros_like(exact) if ours is None else ours,
                exact,
                rtol=tolerance,
                atol=tolerance,
                msg=functools.partial("curvature at differentiable input {}: {}".format, index),
            )


def _joined(outputs: Any) -> Tensor:
    """The output, or all differentiable ones in one vector: views and cat are selections, so they couple nothing."""
    if isinstance(outputs, Tensor):
        return outputs
    return torch.cat([output.reshape(-1) for output in outputs if output.requires_grad])


@dataclass(frozen=True)
class Comparison:
    """How an estimate compares with sampled entries of the exact diagonal, for one parameter.

    >>> batch = (torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1))
    >>> hesscale.testing.compare_with_exact(nn.Linear(2, 1), F.mse_loss, batch)["weight"].relative_error
    0.0
    """

    entries: int
    relative_error: float  # Σ|estimate − exact| / Σ|exact|; 1 is as good as zero everywhere, inf: exact is zero
    rank_correlation: float  # Spearman's, of the signed values
    sign_agreement: float  # share of entries with the right sign


def compare_with_exact(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
    *,
    entries: int = 50,
    method: str = "hesscale",
    rank: Rank = 0,
    seed: int = 0,
) -> dict[str, Comparison]:
    """By parameter name, how close the estimated curvature is to the exact one at ``entries`` random places.

    ``batch`` is (inputs, targets) as in ``hesscale.estimate``: inputs may be a tuple or a mapping of several, and the
    model is afterwards what it was before. Each place costs one Hessian-vector product, on the math kernels of
    attention, since the fused ones cannot be differentiated twice. Dropout draws the same numbers in both passes. What
    is lost in the rounding of the largest entry of all counts as zero: a bias before batch norm has no effect, and no
    relative error.
    ``rank`` as in ``hesscale.backward``.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> batch = (torch.randn(16, 4), torch.randint(3, (16,)))
    >>> found = hesscale.testing.compare_with_exact(model, F.cross_entropy, batch, entries=5)
    >>> found["2.bias"].relative_error < 1e-5  # the last layer is exact
    True
    """
    inputs, targets = batch
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    state = torch.random.get_rng_state()

    def loss() -> Tensor:
        torch.random.set_rng_state(state)
        return loss_of(loss_fn, outputs(model, inputs), targets)

    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    generator, signs = (torch.Generator().manual_seed(seed) for _ in range(2))
    with without_traces(model):
        with unfused(model):
            estimates = diagonal(loss(), list(named.values()), method=method, rank=rank, generator=signs)
        with twice_differentiable(model):
            exact = loss()
            with recomputed_once():
                grads = torch.autograd.grad(exact, list(named.values()), create_graph=True, allow_unused=True)
                for (name, p), grad, estimate in zip(named.items(), grads, estimates, strict=True):
                    if grad is not None and estimate is not None:
                        places = torch.randperm(p.numel(), generator=generator)[:entries]
                        pairs[name] = estimate.reshape(-1)[places.to(p.device)], _entries(grad, p, places)
    rounding = max((10 * torch.finfo(t.dtype).eps * float(t.abs().max()) for _, t in pairs.values()), default=0.0)
    return {name: _compared(*(t.where(t.abs() > rounding, 0.0) for t in pair)) for name, pair in pairs.items()}


def _entries(grad: Tensor, p: Tensor, places: Tensor) -> Tensor:
    exact = torch.zeros(len(places), dtype=p.dtype, device=p.device)
    if grad.requires_grad:
        for i, place in enumerate(places.tolist()):
            (row,) = torch.autograd.grad(grad.reshape(-1)[place], p, retain_graph=True, allow_unused=True)
            exact[i] = 0.0 if row is None else row.reshape(-1)[place]
    return exact


def _compared(estimate: Tensor, exact: Tensor) -> Comparison:
    size = float(exact.abs().sum())
    error = float((estimate - exact).abs().sum())
    return Comparison(
        entries=len(exact),
        relative_error=error / size if size else (0.0 if error == 0 else float("inf")),
        rank_correlation=_correlation(estimate.argsort().argsort(), exact.argsort().argsort()),
        sign_agreement=float((estimate.sign() == exact.sign()).double().mean()),
    )


def _correlation(first: Tensor, second: Tensor) -> float:
    a, b = (t.double() - t.double().mean() for t in (first, second))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else 1.0
