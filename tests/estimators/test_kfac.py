"""Kronecker factors: where they are no approximation, and what has none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale

from . import reference
from .cases import BY_NAME, Case, mlp, numbers
from .test_sampled import draw, relative


@pytest.mark.parametrize("name", ["mlp", "mlp-mse", "mlp-bce", "residual"])
def test_for_one_datum_kfac_is_the_sampled_gauss_newton_diagonal(name: str) -> None:
    case = BY_NAME[name].first()
    torch.testing.assert_close(draw("kfac", case, 7), draw("ggn_mc", case, 7), rtol=1e-10, atol=1e-10)


def test_for_one_datum_and_one_layer_kfac_tends_to_the_gauss_newton_diagonal() -> None:
    case = Case("", nn.Linear(3, 4).double(), F.cross_entropy, (numbers(1, 3), torch.tensor([2])))
    assert relative(draw("kfac", case, 40000), reference.ggn(case).diagonal()) < 0.02


def test_kfac_is_the_product_of_its_factors() -> None:
    """diag(G ⊗ A) written out for a batch and a squared error of one linear layer, where G = 2/3 I."""
    x = numbers(6, 2)
    case = Case("", nn.Linear(2, 3).double(), F.mse_loss, (x, numbers(6, 3)))
    expected = torch.cat([(2 / 3 * x.square().mean(0)).repeat(3), torch.full((3,), 2 / 3, dtype=x.dtype)])
    assert relative(draw("kfac", case, 40000), expected) < 0.02


def test_one_position_makes_a_convolution_a_linear_layer() -> None:
    layer, conv = nn.Linear(8, 3).double(), nn.Conv2d(2, 3, 2).double()
    x, y = numbers(4, 2, 2, 2), torch.tensor([0, 1, 2, 1])
    with torch.no_grad():
        conv.weight.copy_(layer.weight.view_as(conv.weight))
        conv.bias.copy_(layer.bias)  # type: ignore[union-attr]
    flat = Case("", layer, F.cross_entropy, (x.flatten(1), y))
    image = Case("", nn.Sequential(conv, nn.Flatten()), F.cross_entropy, (x, y))
    torch.testing.assert_close(draw("kfac", image, 5), draw("kfac", flat, 5), rtol=1e-10, atol=1e-10)


def test_activations_in_place_change_nothing() -> None:
    model = mlp(nn.ReLU).double()
    in_place = nn.Sequential(model[0], nn.ReLU(inplace=True), model[2], nn.ReLU(inplace=True), model[4])  # type: ignore[index]
    batch = BY_NAME["mlp"].batch
    plain, changed = (Case("", m, F.cross_entropy, batch) for m in (model, in_place))
    torch.testing.assert_close(draw("kfac", changed, 5), draw("kfac", plain, 5), rtol=1e-10, atol=1e-10)


def test_layers_without_factors_are_all_named() -> None:
    case = BY_NAME["batch-norm"]
    with pytest.raises(NotImplementedError, match=r"1\.weight \(BatchNorm1d\), 1\.bias \(BatchNorm1d\)"):
        hesscale.estimate("kfac", case.model, case.loss_fn, case.batch)
    names = ["0.weight", "3.bias"]
    assert list(hesscale.estimate("kfac", case.model, case.loss_fn, case.batch, params=names)) == names


def test_a_layer_called_twice_is_named() -> None:
    shared = nn.Linear(3, 3).double()
    with pytest.raises(NotImplementedError, match=r"0\.weight \(2 calls\)"):
        hesscale.estimate("kfac", nn.Sequential(shared, nn.Tanh(), shared), F.mse_loss, (numbers(2, 3), numbers(2, 3)))


class Tied(nn.Module):
    """One weight in two layers, or in a layer and a function."""

    def __init__(self, *, by_function: bool) -> None:
        super().__init__()
        self.first, self.by_function = nn.Linear(3, 3, bias=False), by_function
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return F.linear(h, self.first.weight) if self.by_function else self.second(h)


@pytest.mark.parametrize("by_function", [False, True])
def test_a_weight_that_is_shared_is_named(by_function: bool) -> None:
    with pytest.raises(NotImplementedError, match=r"one layer reads, once, not: first\.weight \(read 2 times\)"):
        hesscale.estimate("kfac", Tied(by_function=by_function), F.mse_loss, (numbers(2, 3), numbers(2, 3)))
