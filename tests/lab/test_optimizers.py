"""Every row of the table against the authors' update rule, written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale
from hesscale.optim.sources import hutchinson_backward, sampled_gauss_newton_backward
from hesscale_lab.optimizers import OPTIMIZERS, backward, best_settings, make_optimizer, warm_up
from hesscale_lab.options import Options

LR, BETA1, BETA2, EPS, STEPS = 0.01, 0.8, 0.9, 1e-8, 4


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5, generator=generator)
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(9, 1, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.arange(9) % 3  # all classes: BL89 has no curvature for others, and hesscale moves nothing without any
    return F.cross_entropy(model(x), y)


def probes() -> torch.Generator:
    return torch.Generator().manual_seed(7)


Pass = Callable[[Tensor, list[Tensor], torch.Generator], None]
PASSES: dict[str, Pass] = {
    "AdaBL89": lambda loss, params, generator: hesscale.backward(loss, method="bl89"),
    "AdaHesScaleGN": lambda loss, params, generator: hesscale.backward(loss, method="hesscale_gn"),
    "AdaHesScale": lambda loss, params, generator: hesscale.backward(loss),
    "AdaHessian": lambda loss, params, generator: hutchinson_backward(loss, params, generator=generator),
    "AdaGGNMC": lambda loss, params, generator: sampled_gauss_newton_backward(loss, params, generator=generator),
}


def by_hand(name: str, decay: float) -> list[Tensor]:
    """The authors' rules, parameter by parameter."""
    model, generator = network(), probes()
    params = sorted(model.parameters(), key=lambda p: p.dim() == 1)  # as the optimizer's groups: probes follow it
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for t in range(1, STEPS + 1):
        model.zero_grad()
        loss = loss_of(model, t)
        PASSES[name](loss, params, generator) if name in PASSES else loss.backward()
        for i, p in enumerate(params):
            wd = decay if p.dim() > 1 else 0.0
            g = p.grad + wd * p.detach() if name == "AdamFused" else p.grad.clone()
            h = p.curvature if name in PASSES else g
            with torch.no_grad():
                if name == "SGD":
                    p -= LR * (g + wd * p)
                    continue
                m[i] = BETA1 * m[i] + (1 - BETA1) * (g if name == "AdamFused" else g + wd * p)
                v[i] = BETA2 * v[i] + (1 - BETA2) * (h if name == "AdaGGNMC" else h**2)
                average = v[i] / (1 - BETA2**t)
                scale = average if name == "AdaGGNMC" else average**0.5
                damping = EPS if name in ("AdaHessian", "AdamFused") else EPS + wd
                direction = m[i] / (1 - BETA1**t) / (scale + damping)
                p -= LR * (direction + (wd * p if name == "AdaHessian" else 0.0))
    return [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:a step took the norm")  # the paper has no bound
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_the_authors(name: str, decay: float) -> None:
    model, generator = network(), probes()
    optimizer = make_optimizer(name, model, lr=LR, betas=(BETA1, BETA2), weight_decay=decay)
    for t in range(1, STEPS + 1):
        optimizer.zero_grad()
        backward(optimizer, loss_of(model, t), generator=generator)
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in model.parameters()], by_hand(name, decay), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_state(name: str, tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for t in numbers:
            optimizer.zero_grad()
            backward(optimizer, loss_of(model, t), generator=torch.Generator().manual_seed(t))
            optimizer.step()

    options = {"lr": LR, "betas": (BETA1, BETA2), "weight_decay": 0.05}
    model = network()
    optimizer = make_optimizer(name, model, **options)  # type: ignore[arg-type]
    steps(model, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state")
    other = copy.deepcopy(model)
    steps(model, optimizer, range(2, 4))
    second = make_optimizer(name, other, **options)  # type: ignore[arg-type]
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    steps(other, second, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "name, options",
    [
        (name, ((option, value),))
        for name, row in OPTIMIZERS.items()
        for option, value in (("every", 3), ("eps", 0.1), ("bound", 0.5), ("trust_region", 1e-9), ("rank", 1))
        if option in row.takes
    ],
)
@pytest.mark.filterwarnings("ignore:a step took the norm")
def test_an_option_reaches_the_optimizer(name: str, options: Options) -> None:
    def trained(given: Options) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        model, generator = network(), probes()
        optimizer = make_optimizer(name, model, lr=LR, betas=(BETA1, BETA2), weight_decay=0.05, options=given)
        for t in range(1, 7):
            optimizer.zero_grad()
            backward(optimizer, loss_of(model, t), generator=generator)
            optimizer.step()
        return optimizer, [p.detach() for p in model.parameters()]

    (_, usual), (optimizer, changed) = trained(()), trained(options)
    assert not all(torch.equal(a, b) for a, b in zip(usual, changed, strict=True))
    ((option, value),) = options
    if option == "rank":
        assert optimizer.source.rank == value  # type: ignore[attr-defined]
    elif option == "eps":
        assert optimizer.param_groups[1]["eps"] == value
    else:
        assert all(group[option] == value for group in optimizer.param_groups)


def test_tasks_of_the_paper_have_settings_for_every_optimizer() -> None:
    assert best_settings("cifar10-3c3d", "AdaHesScaleGN") == (1e-4, 0.9, 0.9999)
    for task in ("digits", "mnist-mlp", "cifar10-3c3d", "cifar100-3c3d", "cifar100-allcnnc"):
        for name in OPTIMIZERS:
            found = best_settings(task, name)
            assert found is not None and found.lr > 0 and 0 <= found.beta1 < 1 and 0 <= found.beta2 < 1
    assert best_settings("digits", "Foo") is None
    assert best_settings("foo", "SGD") is None


def test_warming_up_draws_nothing_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    warm_up("SGD")
    assert torch.equal(before, torch.random.get_rng_state())
