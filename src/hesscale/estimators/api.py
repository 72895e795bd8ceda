"""The one call: a table of estimators, and what a user hands to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..columns.dial import Rank, checked_rank
from ..graph import wide
from .exact import ggn, hessian
from .kfac import kfac
from .problem import LossFunction, Problem, chosen_parameters, without_traces
from .propagated import bl89, hesscale, hesscale_gn, squared_gradient
from .sampled import ggn_mc, hutchinson

Estimator = Callable[[Problem], Sequence[Tensor | None]]
"""From a problem to one diagonal per parameter; None where the loss does not depend on it."""

Size = Callable[[Any], float | Tensor]
"""What a batch counts for: how many examples it has, or the sum of their weights."""

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
    rank: Rank = 0,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The diagonal of ``loss_fn(model(inputs), targets)`` as ``method`` sees it, by parameter name.

    ``batch`` is (inputs, targets); a tuple of inputs becomes several arguments of the model, a mapping named ones.
    ``params`` names the parameters wanted, all that require grad if None. ``samples`` and ``generator`` matter to
    ``hutchinson``, ``ggn_mc`` and ``kfac``; without a generator every call draws afresh, and nobody can repeat it.
    ``rank`` is for ``hesscale`` and ``hesscale_gn``, as in ``hesscale.backward``. Parameters in half precision have a
    diagonal in float32.

    Nothing is left behind: no ``.grad``, no ``.curvature``, buffers and torch's own generators as they were. Dropout in
    training mode uses the mask that the next forward pass would use.

    >>> model, batch = nn.Linear(2, 1, bias=False), (torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1))
    >>> hesscale.estimate("hessian", model, F.mse_loss, batch)
    {'weight': tensor([[ 2., 18.]])}
    """
    _check_method(method, "estimate(method, model, loss_fn, batch)")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}")
    if checked_rank(rank) and method not in ("hesscale", "hesscale_gn"):
        raise ValueError(f"rank= goes with 'hesscale' and 'hesscale_gn', not with {method!r}")
    inputs, targets = inputs_and_targets(batch)
    chosen = chosen_parameters(model, params)
    generator = fresh_generator() if generator is None else generator
    problem = Problem(model, loss_fn, inputs, targets, chosen, samples, generator, rank)
    with without_traces(model):
        found = ESTIMATORS[method](problem)
    return {
        name: torch.zeros_like(p, dtype=wide(p.dtype)) if s is None else s.detach().to(wide(p.dtype))
        for (name, p), s in zip(chosen.items(), found, strict=True)
    }


def estimate_over(
    method: str,
    model: nn.Module,
    loss_fn: LossFunction,
    loader: Iterable[tuple[Any, Any]],
    *,
    params: Sequence[str] | None = None,
    samples: int = 1,
    rank: Rank = 0,
    generator: torch.Generator | None = None,
    size: Size | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Tensor]:
    """The mean of ``estimate`` over the batches of ``loader``, each weighted by its number of examples.

    ``loss_fn`` must average over examples: then this is the estimate for the whole data set's mean loss. Of losses that
    are sums it would be neither the sum nor the mean, if batches differ in size.

    ``size`` says how many examples a batch has; without it, it is the length of the tensors in the targets (or in the
    inputs, if there are none), however deep in tuples and mappings. A loss that averages over something else needs it:
    with ``ignore_index=-100``, ``size=lambda batch: (batch[1] != -100).sum()``; with class weights w,
    ``size=lambda batch: w[batch[1]].sum()``. Batches of size 0 are left out.
    ``progress`` is told how many batches are done.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> loader = [(torch.ones(1, 2), torch.zeros(1, 1)), (2 * torch.ones(1, 2), torch.zeros(1, 1))]
    >>> hesscale.estimate_over("hesscale", model, F.mse_loss, loader)
    {'weight': tensor([[5., 5.]])}
    """
    _check_method(method, "estimate_over(method, model, loss_fn, loader)")
    generator = fresh_generator() if generator is None else generator
    totals: dict[str, Tensor] = {}
    count = 0.0
    for done, batch in enumerate(loader, start=1):
        examples = size_of(batch, size)
        if examples:
            found = estimate(
                method, model, loss_fn, batch, params=params, samples=samples, rank=rank, generator=generator
            )
            count += examples
            for name, s in found.items():
                totals[name] = totals[name].add_(s, alpha=examples) if name in totals else s * examples
        progress(done)
    if not count:
        raise ValueError("the loader gave no examples")
    return {name: total / count for name, total in totals.items()}


def _check_method(method: Any, call: str) -> None:
    if not isinstance(method, str):
        raise TypeError(f"call {call}: the method's name comes first, not a {type(method).__name__}")
    if method not in ESTIMATORS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(map(repr, ESTIMATORS))}")


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """The two halves of a batch; TypeError if it is no pair."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        length = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise TypeError(
            f"a batch must be a pair (inputs, targets), not a {type(batch).__name__}{length}; for batches b that hold "
            "both, pass (b, b['labels']): a mapping becomes named arguments of the model"
        )
    return batch[0], batch[1]


def size_of(batch: Any, size: Size | None) -> float:
    """What the mean over a batch counts for in a mean over batches."""
    inputs, targets = inputs_and_targets(batch)
    if size is None:
        return examples_in(inputs, targets)
    count = size(batch)
    count = count.item() if isinstance(count, Tensor) else count
    if not 0 <= count < math.inf:
        raise ValueError(f"size= must say how many examples a batch has, 0 or more, not {count}")
    return count


def examples_in(inputs: Any, targets: Any) -> int:
    """The length that all tensors of the targets have in common, or those of the inputs if there are none."""
    lengths = set(_lengths(targets)) or set(_lengths(inputs))
    if len(lengths) != 1:
        raise ValueError(
            f"how many examples has a batch whose tensors have the lengths {sorted(lengths)}? Say so: size=..., a "
            "function of the batch"
        )
    return lengths.pop()


def _lengths(values: Any) -> Iterator[int]:
    if isinstance(values, Tensor):
        yield from values.shape[:1]
    elif isinstance(values, (Mapping, tuple, list)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _lengths(value)


def fresh_generator() -> torch.Generator:
    """A generator that nobody has drawn from, seeded by chance."""
    generator = torch.Generator()
    generator.seed()  # torch's default would be the same draws in every call
    return generator
