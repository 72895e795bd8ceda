"""Losses of policies: right by themselves, signs included, where diagonals written by hand were not."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import hesscale
from hesscale.testing import exact_diagonal
from hesscale_lab.reinforcement import losses

N, HIDDEN, ACTIONS = 7, 5, 3

Loss = Callable[[Tensor], Tensor]


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ADVANTAGE = draws(N, seed=1)  # of both signs
CHOICES = torch.arange(N) % ACTIONS
VALUES = draws(N, ACTIONS, seed=2)
POLICIES = {
    "softmax": (lambda y: losses.softmax_log_probability(y, CHOICES), ACTIONS),
    "Gaussian": (lambda y: losses.gaussian_log_probability(y, VALUES), 2 * ACTIONS),
}


def loss_of(policy: str, kind: str) -> tuple[Loss, int]:
    log_probability, outputs = POLICIES[policy]
    old = log_probability(draws(N, outputs, seed=3))
    if kind == "policy gradient":
        return lambda y: losses.policy_gradient(log_probability(y), ADVANTAGE), outputs
    return lambda y: losses.ppo_clip(log_probability(y), old, ADVANTAGE), outputs


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["policy gradient", "PPO"])
@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
def test_the_last_layer_is_exact(policy: str, kind: str, method: str) -> None:
    """Against the whole Hessian by torch.func, with advantages of both signs; PPO is clipped for some examples only."""
    loss, outputs = loss_of(policy, kind)
    torch.manual_seed(0)
    layer = nn.Linear(HIDDEN, outputs).double()
    x = draws(N, HIDDEN, seed=4)

    def of_params(params: dict[str, Tensor]) -> Tensor:
        return loss(functional_call(layer, params, (x,)))

    params = {name: p.detach() for name, p in layer.named_parameters()}
    hessians: dict[str, dict[str, Tensor]] = jacrev(jacrev(of_params))(params)
    y = layer(x)
    found = hesscale.diagonal(loss(y), layer, method=method, output=y if method == "hesscale_gn" else None)
    for name, p in params.items():
        block = hessians[name][name].reshape(p.numel(), p.numel())
        diagonal = found[name]
        assert diagonal is not None
        torch.testing.assert_close(diagonal, block.diagonal().view(p.shape), rtol=1e-10, atol=1e-10)
    weights = found["weight"]
    assert weights is not None
    assert weights.min() < 0 < weights.max()


def test_ppo_is_clipped_for_some_examples_only() -> None:
    """So that the test above has seen both."""
    for policy, (log_probability, outputs) in POLICIES.items():
        torch.manual_seed(0)
        y = nn.Linear(HIDDEN, outputs).double()(draws(N, HIDDEN, seed=4)).detach().requires_grad_()
        (g,) = torch.autograd.grad(loss_of(policy, "PPO")[0](y), y)
        clipped = (g == 0).all(1)
        assert clipped.any(), policy
        assert not clipped.all(), policy
        assert log_probability(y).shape == (N,)


def outputs_curvature(loss: Tensor, y: Tensor) -> Tensor:
    (found,) = hesscale.diagonal(loss, [y])
    assert found is not None
    return found


def test_formulas_at_the_outputs_of_softmax_policies() -> None:
    """Where the paper's follow-up had no advantage, and no minus: the formulas in the head of losses.py."""
    y = draws(N, ACTIONS, seed=5).requires_grad_()
    q, taken = y.detach().softmax(-1), torch.nn.functional.one_hot(CHOICES, ACTIONS)
    found = outputs_curvature(losses.policy_gradient(losses.softmax_log_probability(y, CHOICES), ADVANTAGE), y)
    torch.testing.assert_close(found, ADVANTAGE[:, None] * q * (1 - q) / N, rtol=1e-10, atol=1e-12)
    old = losses.softmax_log_probability(y, CHOICES).detach()  # nothing is clipped
    found = outputs_curvature(losses.ppo_clip(losses.softmax_log_probability(y, CHOICES), old, ADVANTAGE), y)
    wanted = -ADVANTAGE[:, None] * ((taken - q) ** 2 - q * (1 - q)) / N
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_formulas_at_the_outputs_of_gaussian_policies() -> None:
    """Where the paper's follow-up had the signs of the log-likelihood: variance as an output, not its logarithm."""
    mean, v = draws(N, seed=6).requires_grad_(), draws(N, seed=7).exp().requires_grad_()
    a = draws(N, seed=8)

    def log_probability() -> Tensor:
        return -0.5 * ((a - mean) ** 2 / v + v.log() + math.log(2 * math.pi))

    loss = losses.policy_gradient(log_probability(), ADVANTAGE)
    at_mean, at_v = hesscale.diagonal(loss, [mean, v])
    assert at_mean is not None
    assert at_v is not None
    torch.testing.assert_close(at_mean, ADVANTAGE / v.detach() / N, rtol=1e-10, atol=1e-12)
    e = ((a - mean) ** 2 / v).detach()
    torch.testing.assert_close(at_v, ADVANTAGE * (e - 0.5) / v.detach() ** 2 / N, rtol=1e-10, atol=1e-12)
    loss = losses.ppo_clip(log_probability(), log_probability().detach(), ADVANTAGE)
    at_mean, _ = hesscale.diagonal(loss, [mean, v])
    assert at_mean is not None
    torch.testing.assert_close(at_mean, -ADVANTAGE * (e - 1) / v.detach() / N, rtol=1e-10, atol=1e-12)


def test_log_probabilities_are_torchs() -> None:
    y = draws(N, 2 * ACTIONS, seed=9)
    normal = torch.distributions.Normal(y[:, :ACTIONS], (0.5 * y[:, ACTIONS:]).exp())
    torch.testing.assert_close(losses.gaussian_log_probability(y, VALUES), normal.log_prob(VALUES).sum(-1))
    categorical = torch.distributions.Categorical(logits=y[:, :ACTIONS])
    torch.testing.assert_close(losses.softmax_log_probability(y[:, :ACTIONS], CHOICES), categorical.log_prob(CHOICES))


def test_samples_follow_their_distribution() -> None:
    noise = torch.rand(40_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5]).double()
    counts = torch.bincount(losses.SOFTMAX.sample(logits.expand_as(noise), noise), minlength=4) / len(noise)
    torch.testing.assert_close(counts.double(), logits.softmax(0), rtol=0, atol=0.01)
    outputs = torch.tensor([1.0, -2.0, 0.0, math.log(4.0)]).double()
    found = losses.GAUSSIAN.sample(outputs.expand_as(noise), noise)
    torch.testing.assert_close(found.mean(0), outputs[:2], rtol=0, atol=0.05)
    torch.testing.assert_close(found.std(0), torch.tensor([1.0, 2.0]).double(), rtol=0, atol=0.05)


def test_losses_of_runs_side_by_side_add_up() -> None:
    log_probability, advantage = draws(4, N, seed=10), draws(4, N, seed=11)
    old = draws(4, N, seed=12)
    for one in (
        lambda k: losses.policy_gradient(log_probability[k], advantage[k]),
        lambda k: losses.ppo_clip(log_probability[k], old[k], advantage[k]),
        lambda k: losses.squared_error(log_probability[k], old[k]),
    ):
        torch.testing.assert_close(one(slice(None)), torch.stack([one(k) for k in range(4)]).sum())


def test_exactness_is_not_a_matter_of_one_layer() -> None:
    """Below the last layer HesScale drops terms; the shipped exact diagonal says so of these losses too."""
    loss, outputs = loss_of("softmax", "policy gradient")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(HIDDEN, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = draws(N, HIDDEN, seed=4)
    exact = exact_diagonal(loss(model(x)), [*model.parameters()])
    found = hesscale.diagonal(loss(model(x)), [*model.parameters()])
    for k, is_exact in enumerate((False, False, True, True)):
        here = found[k]
        assert here is not None
        assert torch.allclose(here, exact[k], rtol=1e-10, atol=1e-10) is is_exact
