"""The one call: a table of estimators, and what a user hands to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .exact import ggn, hessian
from .kfac import kfac
from .problem import LossFunction, Problem, chosen_parameters, without_traces
from .propagated import bl89, hesscale, hesscale_gn, squared_gradient
from .sampled import ggn_mc, hutchinson

Estimator = Callable[[Problem], Sequence[Tensor | None]]
"""From a problem to one diagonal per parameter; None where the loss does not depend on it."""

ESTIMATORS: Mapping[str, Estimator] = {
    "hesscale": hesscale,
    "hesscale_gn": hesscale_gn,
    "bl89": bl89,
    "hessian": hessian,
    "ggn": ggn,
    "hutchinson": hutchinson,
    "ggn_mc": ggn_mc,
    "kfac": kfac,
    "squared_gradient": squared_gradient,
}


def estimate(
    method: str,
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, Any],
    *,
    params: Sequence[str] | None = None,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The diagonal of ``loss_fn(model(inputs), targets)`` as ``method`` sees it, by parameter name.

    ``batch`` is (inputs, targets); a tuple of inputs becomes several arguments of the model, a mapping named ones.
    ``params`` names the parameters wanted, all that require grad if None. ``samples`` and ``generator`` matter to
    ``hutchinson``, ``ggn_mc`` and ``kfac``; without a generator every call draws afresh, and nobody can repeat it.

    Nothing is left behind: no ``.grad``, no ``.curvature``, buffers and torch's own generators as they were. Dropout in
    training mode uses the mask that the next forward pass would use.
    """
    if method not in ESTIMATORS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(map(repr, ESTIMATORS))}")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}")
    inputs, targets = batch
    chosen = chosen_parameters(model, params)
    problem = Problem(model, loss_fn, inputs, targets, chosen, samples, _fresh() if generator is None else generator)
    with without_traces(model):
        found = ESTIMATORS[method](problem)
    return {
        name: torch.zeros_like(p) if s is None else s.detach()
        for (name, p), s in zip(chosen.items(), found, strict=True)
    }


def estimate_over(
    loader: Iterable[tuple[Any, Any]],
    method: str,
    model: nn.Module,
    loss_fn: LossFunction,
    *,
    params: Sequence[str] | None = None,
    samples: int = 1,
    generator: torch.Generator | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Tensor]:
    """The mean of ``estimate`` over the batches of ``loader``, each weighted by its number of targets.

    For a ``loss_fn`` that averages over examples this is the estimate for the whole data set's mean loss.
    ``progress`` is told how many batches are done.
    """
    generator = _fresh() if generator is None else generator
    totals: dict[str, Tensor] = {}
    count = 0
    for done, (inputs, targets) in enumerate(loader, start=1):
        found = estimate(method, model, loss_fn, (inputs, targets), params=params, samples=samples, generator=generator)
        examples = len(targets)
        count += examples
        for name, s in found.items():
            totals[name] = totals[name].add_(s, alpha=examples) if name in totals else s * examples
        progress(done)
    if not count:
        raise ValueError("the loader gave no examples")
    return {name: total / count for name, total in totals.items()}


def _fresh() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()  # torch's default would be the same draws in every call
    return generator
