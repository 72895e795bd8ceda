"""A thousand examples at once must be what one at a time is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale
from hesscale.columns.dial import Rank
from hesscale_lab.studies import stacked_mlp as stacked
from hesscale_lab.studies.quality_time import RANKS
from hesscale_lab.tasks.networks import mlp, seeded

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def problem(activation: type[nn.Module] = nn.Tanh) -> tuple[nn.Sequential, Tensor, Tensor]:
    model = seeded(lambda: mlp(3, 4, 4, 5, activation=activation), 1)
    assert isinstance(model, nn.Sequential)
    generator = torch.Generator().manual_seed(2)
    return model, torch.randn(6, 3, generator=generator, dtype=torch.float64), torch.arange(6) % 5


def check(found: Sequence[Tensor], method: str, model: nn.Module, x: Tensor, y: Tensor, rank: Rank = 0) -> None:
    for i in range(len(x)):
        alone = hesscale.estimate(method, model, F.cross_entropy, (x[i : i + 1], y[i : i + 1]), rank=rank)
        for ours, theirs in zip(found, alone.values(), strict=True):
            torch.testing.assert_close(ours[i], theirs, **TIGHT)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_every_method_gives_each_example_its_own_numbers(activation: type[nn.Module]) -> None:
    model, x, y = problem(activation)
    passed = stacked.stack(model, x, y)
    check(stacked.exact(passed), "hessian", model, x, y)
    check(stacked.exact(passed, gauss_newton=True), "ggn", model, x, y)
    check(stacked.squared_gradient(passed), "squared_gradient", model, x, y)
    for method in ("hesscale", "hesscale_gn", "bl89"):
        check(stacked.propagated(passed, method), method, model, x, y)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_columns_give_each_example_its_own_numbers(activation: type[nn.Module]) -> None:
    model, x, y = problem(activation)
    passed = stacked.stack(model, x, y)
    ranked = {rank: stacked.propagated(passed, "hesscale", rank=rank) for rank in RANKS.values()}
    for rank, found in ranked.items():
        check(found, "hesscale", model, x, y, rank)
    residual = [
        s - t
        for s, t in zip(stacked.propagated(passed, "hesscale"), stacked.propagated(passed, "hesscale_gn"), strict=True)
    ]
    ggn = stacked.exact(passed, gauss_newton=True)
    for full, matrix, rest in zip(ranked["full"], ggn, residual, strict=True):
        torch.testing.assert_close(full, matrix + rest, **TIGHT)


def test_samples_tend_to_what_they_estimate() -> None:
    model, x, y = problem()
    passed, generator = stacked.stack(model, x, y), torch.Generator().manual_seed(0)
    *_, last = stacked.sampled_gauss_newton(passed, 3000, generator)
    for ours, exact in zip(last, stacked.exact(passed, gauss_newton=True), strict=True):
        assert float((ours - exact).norm() / exact.norm()) < 0.1
    probes = [found for found, _ in stacked.probed_hessian(passed, 1000, generator)]
    for place, exact in enumerate(stacked.exact(passed)):
        mean = torch.stack([found[place] for found in probes]).mean(0)
        assert float((mean - exact).norm() / exact.norm()) < 0.6


def test_the_authors_form_is_the_size_of_hv() -> None:
    model, x, y = problem()
    passed = stacked.stack(model, x, y)
    ((signed, sizes),) = stacked.probed_hessian(passed, 1, torch.Generator().manual_seed(0))
    for v_hv, size in zip(signed, sizes, strict=True):
        assert torch.equal(v_hv.abs(), size)


def test_only_plain_networks_are_stacked() -> None:
    linear = nn.Linear(3, 3)
    assert stacked.is_mlp(mlp(3, 4, 2, activation=nn.ReLU))
    for model in (linear, nn.Sequential(linear, nn.Tanh()), nn.Sequential(linear, nn.GELU(), linear)):
        assert not stacked.is_mlp(model)
