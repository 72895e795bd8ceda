"""Runs side by side: each learns as it would alone."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hesscale
from hesscale_lab.reinforcement import training
from hesscale_lab.reinforcement.environments import ENVIRONMENTS
from hesscale_lab.reinforcement.losses import policy_gradient, softmax_log_probability, squared_error
from hesscale_lab.reinforcement.training import ALGORITHMS, Method, Runs, curves
from hesscale_lab.studies.reinforcement import METHODS

CART_POLE = ENVIRONMENTS["CartPole"]


def runs_of(method: str, algorithm: str = "A2C", environment: str = "CartPole", **options: Any) -> Runs:
    usual = {"rates": [1e-3, 1e-2], "seeds": [0, 1]}
    return Runs(ENVIRONMENTS[environment], ALGORITHMS[algorithm], METHODS[method], **{**usual, **options})


def params_of(runs: Runs) -> Tensor:
    """[runs, entries]."""
    blocks = [
        torch.cat([p.detach().flatten(1) for net in block.nets for layer in net for p in layer], 1)
        for block in runs._blocks
    ]
    return torch.cat(blocks)


@pytest.mark.filterwarnings("ignore:a step took the norm")  # without a bound
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_method_moves_every_run(method: str, algorithm: str) -> None:
    runs = runs_of(method, algorithm)
    before = params_of(runs).clone()
    next(runs.rounds(10**6))
    assert ((params_of(runs) - before).abs().amax(1) > 1e-5).all()
    assert runs.settings == [(1e-3, 0), (1e-3, 1), (1e-2, 0), (1e-2, 1)]
    assert all(runs.alive)


@pytest.mark.filterwarnings("ignore:a step took the norm")  # without a bound
@pytest.mark.parametrize("method", ["Adam", "AdaHesScale", "AdaHesScaleGN"])
def test_seeds_in_one_block_learn_as_in_blocks_of_their_own(method: str) -> None:
    """Entry by entry: that is what makes it right to stack them."""
    found = []
    for by_entry in (True, False):
        row = METHODS[method]
        runs = Runs(
            CART_POLE,
            ALGORITHMS["A2C"],
            Method(row.make, row.curvature, by_entry=by_entry),
            rates=[1e-3],
            seeds=[0, 1, 2],
        )
        for _ in runs.rounds(3 * 64):
            pass
        found.append(params_of(runs))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_an_update_is_that_of_a_plain_network() -> None:
    """By hand: nn.Linear layers, A2C's loss of one run, AdaHesScale of its own."""
    runs = runs_of("AdaHesScale", rates=[1e-2], seeds=[3])
    nets = [plain(weights) for weights in runs._blocks[0].nets]
    optimizers = [hesscale.AdaHesScale(net.parameters(), lr=1e-2) for net in nets]
    experience, _ = runs._play()
    advantages, returns = runs._advantages(experience)
    runs._learn(experience)
    seen, actions = experience["seen"].flatten(1, 2)[0], experience["actions"].flatten()
    chosen = softmax_log_probability(nets[0](seen), actions)
    parts = (policy_gradient(chosen, advantages.flatten()), squared_error(nets[1](seen).squeeze(-1), returns.flatten()))
    for optimizer, loss in zip(optimizers, parts, strict=True):
        optimizer.backward(loss)
        optimizer.step()
    for net, weights in zip(nets, runs._blocks[0].nets, strict=True):
        for mine, theirs in zip(plain(weights).parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def plain(weights: training.Weights) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in weights:
        linear = nn.Linear(*weight.shape[1:])
        linear.weight.data, linear.bias.data = weight.detach()[0].T.clone(), bias.detach()[0, 0].clone()
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def test_advantages_by_the_definition() -> None:
    """A_t = Σ_k (γλ)^k δ_{t+k} up to the end of the episode, which is a failure or not."""
    runs = runs_of("Adam", rates=[1e-3], seeds=[0])
    shape = (1, 5, 8)
    generator = torch.Generator().manual_seed(0)
    over = torch.rand(shape, generator=generator) < 0.4
    e = {
        "reward": torch.randn(shape, generator=generator),
        "seen": torch.randn(*shape, 4, generator=generator),
        "last": torch.randn(*shape, 4, generator=generator),
        "over": over,
        "goes_on": (~over | (torch.rand(shape, generator=generator) < 0.5)).float(),
    }
    found, returns = runs._advantages(e)
    critic = plain(runs._blocks[0].nets[1])
    values, nexts = (critic(e[name]).squeeze(-1).detach() for name in ("seen", "last"))
    surprise = e["reward"] + 0.99 * nexts * e["goes_on"] - values
    for t in range(5):
        for copy in range(8):
            total, weight = 0.0, 1.0
            for k in range(t, 5):
                total += weight * float(surprise[0, k, copy])
                weight *= 0.99
                if over[0, k, copy]:
                    break
            assert float(found[0, t, copy]) == pytest.approx(total, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(returns, found + values)


def test_a_run_that_is_not_finite_stands_still_and_the_others_go_on() -> None:
    runs = runs_of("AdaHesScale")
    runs._blocks[0].nets[0][0][0].data[1] = math.nan
    before = params_of(runs).clone()
    for _ in runs.rounds(2 * 64):
        pass
    assert runs.alive == [True, False, True, True]
    after = params_of(runs)
    assert (after[[0, 2, 3]] != before[[0, 2, 3]]).any(1).all()
    assert torch.isfinite(after).all()


def test_it_learns() -> None:
    found = curves(runs_of("AdaHesScale", rates=[3e-3], seeds=[0, 1, 2]), 6 * 1024)
    assert [len(curve) for curve in found] == [10, 10, 10]
    first, last = (sum(curve[k] or 0.0 for curve in found) for k in (0, -1))
    assert last > 1.5 * first


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_torques_are_learnt_too(algorithm: str) -> None:
    runs = runs_of("AdaHesScaleGN", algorithm, "Pendulum", seeds=[0])
    experience, _ = runs._play()
    assert experience["actions"].shape[-1] == 1
    runs._learn(experience)
    assert all(runs.alive)


def test_the_same_seeds_make_the_same_runs() -> None:
    found = [curves(runs_of("AdaHesScaleGN"), 1024) for _ in range(2)]
    assert found[0] == found[1]
