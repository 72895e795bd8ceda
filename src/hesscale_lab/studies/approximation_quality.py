"""How close estimates come to the exact diagonal of the Hessian (section 4, figure 1 of Elsayed & Mahmood 2022).

Random examples go one at a time through an untrained tanh network. The error of an estimate is its L1 distance from the
exact diagonal: summed over all parameters, averaged over examples, one number per layer and seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F

import hesscale

Estimator = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor | None]]
"""From a loss and parameters to one diagonal per parameter; None stands for zeros."""

REFERENCE = "HesScale"
"""The method whose error is the unit of all relative errors."""

ZERO = "|diag H|"
"""The estimate zero: its error is the L1 norm of the exact diagonal, what one is off by without any estimate."""

WIDTHS = (6, 16, 16, 16, 10)
"""The paper's network: six inputs, three hidden layers, ten classes."""

_EXAMPLES_AT_ONCE = 8  # full Hessians in memory: 5 MB each at the paper's widths


def _zero(loss: Tensor, params: Sequence[Tensor]) -> Sequence[None]:
    return [None] * len(params)


ESTIMATORS: Mapping[str, Estimator] = {
    REFERENCE: functools.partial(hesscale.diagonal, method="hesscale"),
    "BL89": functools.partial(hesscale.diagonal, method="bl89"),
    "HesScaleGN": functools.partial(hesscale.diagonal, method="hesscale_gn"),
    ZERO: _zero,
}


@dataclass(frozen=True)
class Problem:
    """One network and the examples it is measured on."""

    model: nn.Sequential
    x: Tensor  # [examples, inputs]
    y: Tensor  # [examples]


@dataclass(frozen=True)
class MethodErrors:
    """Mean L1 errors of one method."""

    method: str
    by_layer: tuple[tuple[float, ...], ...]  # [seed][layer]

    @property
    def by_seed(self) -> tuple[float, ...]:
        """One error per seed: the sum over layers."""
        return tuple(sum(layers) for layers in self.by_layer)

    @property
    def layer_means(self) -> tuple[float, ...]:
        """One error per layer: the mean over seeds."""
        return tuple(fmean(layer) for layer in zip(*self.by_layer, strict=True))


@dataclass(frozen=True)
class Quality:
    """What ``measure`` found, and for what."""

    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    examples: int
    methods: tuple[MethodErrors, ...]


@dataclass(frozen=True)
class Summary:
    """One method in a line: its mean error, alone and in units of HesScale's, which is also given seed by seed."""

    method: str
    error: float
    relative: float
    relative_by_seed: tuple[float, ...]


def measure(
    seeds: Sequence[int],
    *,
    examples: int,
    widths: Sequence[int] = WIDTHS,
    estimators: Mapping[str, Estimator] = ESTIMATORS,
    progress: Callable[[int], None] = lambda done: None,
) -> Quality:
    """The errors of all ``estimators``; ``progress`` is told how many seeds are done."""
    if not seeds or examples < 1:
        raise ValueError("at least one seed and one example are needed")
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in estimators}
    for done, seed in enumerate(seeds, start=1):
        problem = make_problem(seed, examples=examples, widths=widths)
        exact = exact_diagonals(problem)
        for name, estimator in estimators.items():
            found[name].append(layer_errors(problem, estimator, exact))
        progress(done)
    methods = tuple(MethodErrors(name, tuple(errors)) for name, errors in found.items())
    return Quality(tuple(widths), tuple(seeds), examples, methods)


def summarize(quality: Quality) -> tuple[Summary, ...]:
    """One line per method, in the order measured. Relative errors are ratios to HesScale's (the mean's to its mean)."""
    unit = next(errors.by_seed for errors in quality.methods if errors.method == REFERENCE)
    return tuple(
        Summary(
            method=errors.method,
            error=fmean(errors.by_seed),
            relative=fmean(errors.by_seed) / fmean(unit),
            relative_by_seed=tuple(error / one for error, one in zip(errors.by_seed, unit, strict=True)),
        )
        for errors in quality.methods
    )


def make_problem(seed: int, *, examples: int, widths: Sequence[int] = WIDTHS) -> Problem:
    """A float64 tanh network with torch's default initialization, inputs from N(0, I), labels drawn uniformly."""
    # nn.Linear draws from the global generator only, so that one is seeded, and put back afterwards
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.Tanh()]
        x = torch.randn(examples, widths[0], dtype=torch.float64)
        y = torch.randint(widths[-1], (examples,))
    return Problem(nn.Sequential(*layers[:-1]), x, y)


def exact_diagonals(problem: Problem) -> tuple[Tensor, ...]:
    """The exact diagonals of every example's Hessian, [examples, *shape] for each parameter."""
    named = {name: p.detach() for name, p in problem.model.named_parameters()}
    sizes = [p.numel() for p in named.values()]

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        pieces = zip(named.items(), flat.split(sizes), strict=True)
        params = {name: piece.view(p.shape) for (name, p), piece in pieces}
        return F.cross_entropy(functional_call(problem.model, params, (x,)), y)

    flat = torch.cat([p.flatten() for p in named.values()])

    def of_example(x: Tensor, y: Tensor) -> Tensor:
        return jacrev(grad(loss))(flat, x, y).diagonal()

    diagonals = vmap(of_example, chunk_size=_EXAMPLES_AT_ONCE)(problem.x, problem.y)  # [examples, parameters]
    pieces = zip(diagonals.split(sizes, dim=1), named.values(), strict=True)
    return tuple(piece.reshape(-1, *p.shape) for piece, p in pieces)


def layer_errors(problem: Problem, estimator: Estimator, exact: Sequence[Tensor]) -> tuple[float, ...]:
    """The L1 error in each layer (its weight and bias together), averaged over examples."""
    params = list(problem.model.parameters())
    errors = [0.0] * len(params)
    for i in range(len(problem.x)):
        loss = F.cross_entropy(problem.model(problem.x[i : i + 1]), problem.y[i : i + 1])
        for j, estimate in enumerate(estimator(loss, params)):
            truth = exact[j][i]
            errors[j] += float((truth if estimate is None else truth - estimate).abs().sum())
    means = [error / len(problem.x) for error in errors]
    return tuple(weight + bias for weight, bias in zip(means[::2], means[1::2], strict=True))
