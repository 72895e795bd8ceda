"""The checks that are shipped to users: they pass what is right and catch what is wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.plan import METHODS, Method
from hesscale.rules import RULES
from hesscale.testing import check_rule, compare_with_exact, exact_diagonal


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


def test_exact_diagonal_of_a_quadratic() -> None:
    x, matrix = leaf(4), leaf(4, 4).detach()
    (found,) = exact_diagonal(x @ matrix @ x, x)
    torch.testing.assert_close(found, 2 * matrix.diagonal())


def test_exact_diagonal_of_what_is_linear_or_unused() -> None:
    x, unused = leaf(4), leaf(3)
    found = exact_diagonal(x.sum(), (x, unused))
    torch.testing.assert_close(found, (torch.zeros_like(x), torch.zeros_like(unused)))


@pytest.mark.parametrize("factor", [1.0, 1.0001])
def test_check_rule_catches_a_wrong_coefficient(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = hesscale.Elementwise(lambda node: (None, factor * -2 * node._saved_result * (1 - node._saved_result**2)))
    monkeypatch.setitem(METHODS, "hesscale", Method(RULES.overlay({"TanhBackward0": wrong})))
    if factor == 1.0:
        check_rule(torch.tanh, leaf(3))
    else:
        with pytest.raises(AssertionError, match="differentiable input 0"):
            check_rule(torch.tanh, leaf(3))


def test_check_rule_wants_something_to_differentiate() -> None:
    with pytest.raises(ValueError, match="requires grad"):
        check_rule(torch.tanh, torch.ones(3))


def test_comparison_is_perfect_where_hesscale_is_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    batch = torch.randn(10, 6, dtype=torch.float64), torch.randint(0, 4, (10,))
    for result in compare_with_exact(model, F.cross_entropy, batch, entries=7).values():
        assert result.relative_error < 1e-10
        assert result.rank_correlation == pytest.approx(1.0)
        assert result.sign_agreement == 1.0
        assert result.entries <= 7


def test_comparison_with_attention_dropout_and_lstm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3), nn.Linear(8, 3))
    batch = torch.randn(5, 4, 6), torch.randint(0, 3, (20,))
    results = compare_with_exact(model, lambda out, y: F.cross_entropy(out.flatten(0, 1), y), batch, entries=5)
    assert results["2.weight"].relative_error < 1e-4  # single precision, the same dropout in both passes
    recurrent = nn.LSTM(6, 5)
    compared = compare_with_exact(recurrent, lambda out, y: (out[0] - y).square().mean(), (batch[0], 0.3), entries=5)
    assert all(result.relative_error >= 0 for result in compared.values())
    assert torch._C._get_mkldnn_enabled()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.first(x)) + shift)
        return found


@pytest.mark.parametrize("named", [False, True], ids=["tuple", "mapping"])
def test_comparison_of_a_model_with_several_inputs_leaves_it_as_it_was(named: bool) -> None:
    torch.manual_seed(0)
    model, x, shift, y = Pair(), torch.randn(8, 4), torch.randn(8, 5), torch.randint(3, (8,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = {"x": x, "shift": shift} if named else (x, shift)
    results = compare_with_exact(model, F.cross_entropy, (inputs, y), entries=9)
    assert results["last.weight"].relative_error < 1e-5
    assert results["first.bias"].relative_error in (0.0, float("inf"))  # a bias before batch norm has no effect
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
