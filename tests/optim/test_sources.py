"""The sampled sources of AdaHessian and AdaGGNMC: right on average, and where they write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.optim import CurvatureScaled

from .small import assert_same, loss_of, network, random

DRAWS = 500


def gauss_newton(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The exact diagonal of Jᵀ H J, H the Hessian of the loss at the network's output."""
    y = model(x)
    h = torch.autograd.functional.hessian(lambda z: loss(z.view_as(y)), y.detach().flatten())
    found = []
    for p in model.parameters():
        rows = [torch.autograd.grad(entry, p, retain_graph=True)[0].flatten() for entry in y.flatten()]
        j = torch.stack(rows)
        found.append(torch.einsum("ki,kl,li->i", j, h, j).view_as(p))
    return found


def averaged(optimizer: hesscale.AdaGGNMC | hesscale.AdaHessian, loss: Callable[[], Tensor]) -> list[Tensor]:
    params = optimizer.param_groups[0]["params"]
    sums = [torch.zeros_like(p) for p in params]
    generator = torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        optimizer.zero_grad()
        optimizer.backward(loss(), generator=generator)
        for total, p in zip(sums, params, strict=True):
            total += p.curvature
    return [total / DRAWS for total in sums]


def assert_near(ours: list[Tensor], exact: list[Tensor]) -> None:
    a, b = (torch.cat([t.flatten() for t in tensors]) for tensors in (ours, exact))
    assert (a - b).norm() < 0.2 * b.norm()
    assert abs(a.sum() - b.sum()) < 0.1 * b.abs().sum()


WEIGHTS = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "weighted, smoothed": lambda y: 2 * F.cross_entropy(y, torch.tensor([0, 2, 1]), WEIGHTS, label_smoothing=0.1),
    "nll": lambda y: F.nll_loss(F.log_softmax(y, -1), torch.tensor([0, 2, -100])),
    "mse": lambda y: F.mse_loss(y, random(3, 3, seed=7)),
    "mse, sum": lambda y: F.mse_loss(y, random(3, 3, seed=7), reduction="sum") / 3,
    "mse, none": lambda y: F.mse_loss(y, random(3, 3, seed=7), reduction="none").mean(),
    "bce": lambda y: F.binary_cross_entropy_with_logits(
        y, torch.eye(3, dtype=torch.float64), WEIGHTS, pos_weight=WEIGHTS
    ),
    "two heads": lambda y: F.mse_loss(y[:, :1], random(3, 1)) + F.cross_entropy(y[:, 1:], torch.tensor([0, 1, 1])),
}


@pytest.mark.parametrize("name", ["weighted, smoothed", "nll", "mse, none", "bce", "two heads"])
def test_draws_average_to_the_gauss_newton_diagonal(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    for seed, p in enumerate(model.parameters()):
        p.data.copy_(random(*p.shape, seed=seed))
    x = random(3, 2, seed=9)
    optimizer = hesscale.AdaGGNMC(model.parameters())
    assert_near(averaged(optimizer, lambda: LOSSES[name](model(x))), gauss_newton(model, x, LOSSES[name]))


def test_reductions_of_the_squared_error_agree() -> None:
    found = []
    for name in ("mse", "mse, sum", "mse, none"):
        y = random(3, 3).requires_grad_()
        optimizer = hesscale.AdaGGNMC([y])
        optimizer.backward(LOSSES[name](y * 1.0), generator=torch.Generator().manual_seed(0))
        found.append(y.curvature / (3 if name == "mse, sum" else 1))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_probes_average_to_the_hessian_diagonal() -> None:
    model = network()
    optimizer = hesscale.AdaHessian(model.parameters())
    exact = hesscale.testing.exact_diagonal(loss_of(model), list(model.parameters()))
    assert_near(averaged(optimizer, lambda: loss_of(model)), list(exact))


def test_kernels_of_convolutions_share_their_average() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()

    def curvature(*, spatial_average: bool) -> Tensor:
        optimizer = hesscale.AdaHessian(model.parameters())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(random(5, 1, 4, 4)), torch.tensor([0, 1, 2, 0, 1]))
        optimizer.backward(loss, spatial_average=spatial_average, generator=torch.Generator().manual_seed(0))
        found: Tensor = model[0].weight.curvature
        return found

    single = curvature(spatial_average=False)
    torch.testing.assert_close(
        curvature(spatial_average=True), single.abs().mean((2, 3), keepdim=True).expand_as(single)
    )


@pytest.mark.parametrize("preset", [hesscale.AdaGGNMC, hesscale.AdaHessian])
def test_gradients_are_those_of_backward(preset: type[hesscale.AdaGGNMC] | type[hesscale.AdaHessian]) -> None:
    model, other = network(), network()
    optimizer = preset(model.parameters())
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for batch in range(2):
        optimizer.backward(loss_of(model, batch))
        loss_of(other, batch).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    assert len(seen) == 2
    assert not any(p.grad.requires_grad or p.curvature.requires_grad for p in model.parameters())


@pytest.mark.parametrize("preset", [hesscale.AdaGGNMC, hesscale.AdaHessian])
def test_parameters_out_of_reach(preset: type[hesscale.AdaGGNMC] | type[hesscale.AdaHessian]) -> None:
    model = network()
    frozen, idle = nn.Parameter(random(2), requires_grad=False), nn.Parameter(random(2))
    optimizer = preset([frozen, idle, *model.parameters()])
    optimizer.backward(loss_of(model))
    assert idle.grad is None
    optimizer.step()
    with pytest.raises(RuntimeError, match="depends on no parameter of this optimizer"):
        preset([idle]).backward(loss_of(model))


def test_a_loss_that_is_no_likelihood_is_refused() -> None:
    y = random(3).requires_grad_()
    optimizer = hesscale.AdaGGNMC([y])
    with pytest.raises(ValueError, match="the loss ends in PowBackward0"):
        optimizer.backward((y**4).sum())
    with pytest.raises(ValueError, match="negative weight"):
        optimizer.backward(-F.mse_loss(y * 1.0, torch.zeros_like(y)))
    with pytest.raises(ValueError, match="output does not lie behind"):
        optimizer.backward(F.mse_loss(y * 1.0, torch.zeros_like(y)), output=y.exp())


def test_the_output_may_be_named() -> None:
    model = network()
    optimizer = hesscale.AdaGGNMC(model.parameters())
    logits = model(random(6, 5))
    optimizer.backward(F.cross_entropy(logits, torch.arange(6) % 3), output=logits)
    assert (model[0].weight.curvature >= 0).all()


def test_a_linear_loss_has_no_curvature_for_hutchinson() -> None:
    p = nn.Parameter(random(3))
    hesscale.AdaHessian([p]).backward((2 * p).sum())
    assert not p.curvature.any()


@pytest.mark.parametrize("preset", [hesscale.AdaGGNMC, hesscale.AdaHessian])
def test_curvature_belongs_to_its_gradient(preset: type[hesscale.AdaGGNMC] | type[hesscale.AdaHessian]) -> None:
    """After zero_grad() of the model and a plain backward, a pass adds to that gradient, not to earlier curvature."""
    model = network()
    optimizer = preset(model.parameters())

    def curvatures(seed: int) -> list[Tensor]:
        optimizer.backward(loss_of(model), generator=torch.Generator().manual_seed(seed))
        return [p.curvature.clone() for p in model.parameters()]

    first = curvatures(0)
    model.zero_grad()
    loss_of(model).backward()
    assert_same(curvatures(0), first)
    both = curvatures(1)
    model.zero_grad()
    second = curvatures(1)
    torch.testing.assert_close(both, [a + b for a, b in zip(first, second, strict=True)])


@pytest.mark.parametrize("rank", [0, 1, 3, "full"])
@pytest.mark.parametrize("preset", [hesscale.AdaHesScale, hesscale.AdaHesScaleGN])
@pytest.mark.parametrize("attached", [False, True])
def test_rank_is_that_of_every_pass(preset: type[CurvatureScaled], rank: Any, attached: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    optimizer = preset(model.parameters(), rank=rank)
    loss = F.cross_entropy(model(x), y)
    optimizer.attach(loss).backward() if attached else optimizer.backward(loss)
    method = "hesscale" if preset is hesscale.AdaHesScale else "hesscale_gn"
    expected = hesscale.diagonal(F.cross_entropy(model(x), y), model, method=method, rank=rank)
    for name, p in model.named_parameters():
        assert torch.equal(p.curvature, expected[name])
    optimizer.step()


@pytest.mark.parametrize("preset", [hesscale.AdaBL89, hesscale.AdaHessian, CurvatureScaled])
def test_rank_is_refused_where_there_are_no_columns(preset: type[CurvatureScaled]) -> None:
    with pytest.raises(ValueError, match="rank= goes with"):
        preset(nn.Linear(2, 2).parameters(), rank=1)
    with pytest.raises(ValueError, match="rank"):
        hesscale.AdaHesScale(nn.Linear(2, 2).parameters(), rank=-1)
