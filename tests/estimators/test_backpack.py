"""BackPACK's quantities, as independent oracles. Skipped without BackPACK; pyproject.toml says how to install it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hesscale

from .cases import mlp, numbers
from .reference import flat
from .test_sampled import relative

backpack = pytest.importorskip("backpack")
extensions = pytest.importorskip("backpack.extensions")
# BackPACK hooks modules in a way that torch has announced to end
pytestmark = pytest.mark.filterwarnings("ignore")


def cnn() -> nn.Module:
    """No average pooling: BackPACK's works in float32 only."""
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2, stride=2), nn.Tanh()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2, 3))


LABELS, VALUES = torch.tensor([0, 2, 1, 1]), numbers(4, 3)
PROBLEMS = {
    "mlp": (mlp, nn.CrossEntropyLoss(), numbers(4, 3), LABELS),
    "mlp-sum": (mlp, nn.CrossEntropyLoss(reduction="sum"), numbers(4, 3), LABELS),
    "mlp-mse": (mlp, nn.MSELoss(), numbers(4, 3), VALUES),
    "cnn": (cnn, nn.CrossEntropyLoss(), numbers(4, 2, 6, 6), LABELS),
}
problems = pytest.mark.parametrize("name", PROBLEMS)


def made(name: str) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    make, loss_fn, inputs, targets = PROBLEMS[name]
    torch.manual_seed(3)
    return make().double(), loss_fn, (inputs, targets)


def theirs(name: str, extension: Any, field: str) -> list[Any]:
    """What BackPACK leaves in a field of the parameters."""
    model, loss_fn, (inputs, targets) = made(name)
    model, loss_fn = backpack.extend(model), backpack.extend(loss_fn)
    with backpack.backpack(extension):
        loss_fn(model(inputs), targets).backward()
    return [getattr(p, field) for p in model.parameters()]


def ours(method: str, name: str, **more: Any) -> Tensor:
    model, loss_fn, batch = made(name)
    return flat(hesscale.estimate(method, model, loss_fn, batch, **more))


def joined(pieces: list[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


@problems
def test_diag_hessian(name: str) -> None:
    found = joined(theirs(name, extensions.DiagHessian(), "diag_h"))
    torch.testing.assert_close(ours("hessian", name), found, rtol=1e-10, atol=1e-10)


@problems
def test_diag_ggn_exact(name: str) -> None:
    found = joined(theirs(name, extensions.DiagGGNExact(), "diag_ggn_exact"))
    torch.testing.assert_close(ours("ggn", name), found, rtol=1e-10, atol=1e-10)


@problems
def test_diag_ggn_mc_in_expectation(name: str) -> None:
    torch.manual_seed(0)
    found = joined(theirs(name, extensions.DiagGGNMC(mc_samples=5000), "diag_ggn_mc"))
    mine = ours("ggn_mc", name, samples=5000, generator=torch.Generator().manual_seed(1))
    assert relative(mine, found) < 0.06


@problems
def test_kfac_in_expectation(name: str) -> None:
    torch.manual_seed(0)
    factors = theirs(name, extensions.KFAC(mc_samples=5000), "kfac")
    diagonals = []
    for kron in factors:
        diagonal = kron[0].diagonal()
        for factor in kron[1:]:
            diagonal = torch.outer(diagonal, factor.diagonal()).reshape(-1)
        diagonals.append(diagonal)
    mine = ours("kfac", name, samples=5000, generator=torch.Generator().manual_seed(1))
    assert relative(mine, joined(diagonals)) < 0.06
