"""Gradient penalties: graphs that hold the nodes of a backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.testing import exact_diagonal

from .case import constant, randn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu, tanh": lambda t: F.gelu(t, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "leaky relu": F.leaky_relu,
    "elu": F.elu,
    "log-sigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross-entropy": lambda y: F.cross_entropy(y, torch.arange(len(y)) % y.shape[1]),
    "smoothed": lambda y: F.cross_entropy(y, torch.arange(len(y)) % y.shape[1], label_smoothing=0.1),
    "mse": lambda y: F.mse_loss(y, torch.ones_like(y)),
    "bce": lambda y: F.binary_cross_entropy_with_logits(y, torch.ones_like(y)),
    "sum": torch.sum,
}


def penalty(loss: Tensor, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (slope.flatten(1).norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_networks_run(activation: str, loss: str) -> None:
    torch.manual_seed(0)
    net = [nn.Linear(5, 7).double(), nn.Linear(7, 3).double()]
    x = randn(6, 5)
    hesscale.backward(penalty(LOSSES[loss](net[1](ACTIVATIONS[activation](net[0](x)))), x))
    for p in (p for layer in net for p in layer.parameters()):
        assert torch.isfinite(p.curvature).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2)])
def test_convolutional_networks_run(pool: nn.Module) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 2, 3, padding=1), nn.LeakyReLU(), pool, nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 2)),
        *(nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)),
    ).double()
    x = randn(6, 1, 4, 4)
    hesscale.backward(penalty(LOSSES["cross-entropy"](net(x)), x))
    assert all(torch.isfinite(p.curvature).all() for p in net.parameters())


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "gelu", "softplus", "elu"])
def test_one_unit_and_no_other_path_is_exact(activation: str) -> None:
    """d/dx f(wx) = w f'(wx): with w as data, what is left is a chain of element-wise functions of x."""
    x, w = randn(1), constant(randn(1, seed=1))
    u = torch.ones_like(x, requires_grad=True)
    y = ACTIVATIONS[activation](x * w)
    (slope,) = torch.autograd.grad(y, x, u, create_graph=True)
    (found,) = hesscale.diagonal(slope.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(found, exact_diagonal(slope.square().sum(), x)[0], rtol=1e-10, atol=1e-10)
