"""A look at a network: every number by hand, the estimate of rounding against real rounding, and what is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import hesscale
from hesscale.applications import inspect
from hesscale.applications.inspection import QUANTILES


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    return model, [(torch.randn(n, 3, dtype=torch.float64), torch.randint(4, (n,))) for n in (4, 7)]


def test_numbers_are_those_of_the_diagonal() -> None:
    model, batches = problem()
    found = inspect(model, F.cross_entropy, batches)
    diagonal = hesscale.applications.diagonal_over(model, F.cross_entropy, batches)
    assert [layer.name for layer in found.layers] == [name for name, _ in model.named_parameters()]
    for layer in found.layers:
        h, w = diagonal[layer.name].flatten(), model.get_parameter(layer.name).detach()
        assert layer.size == h.numel()
        assert layer.trace == pytest.approx(float(h.sum()), rel=1e-12)
        assert layer.negative == pytest.approx(sum(float(x) < 0 for x in h) / len(h))
        lower = torch.quantile(h, torch.tensor(QUANTILES, dtype=torch.float64), interpolation="lower")
        assert layer.quantiles == tuple(lower.tolist())
        step = float(w.max() - w.min()) / 15
        assert layer.sensitivity[4] == pytest.approx(float((h * step**2 / 12 / 2).sum()), rel=1e-12)
    assert found.most_sensitive[0].sensitivity[4] == max(layer.sensitivity[4] for layer in found.layers)
    assert 0 < max(layer.negative for layer in found.layers) <= 1


def test_rounding_costs_what_the_estimate_says() -> None:
    """A quadratic loss with a diagonal Hessian, 8 bits, 40,000 weights: errors average out."""
    torch.manual_seed(0)
    model = nn.Linear(40_000, 1, bias=False).double()
    h = torch.rand(1, 40_000, dtype=torch.float64)
    w = model.weight.detach().clone()

    def loss(outputs, targets):
        return (h * (model.weight - w).square()).sum() / 2 + 0 * outputs.sum()

    batches = [(torch.zeros(1, 40_000, dtype=torch.float64), torch.zeros(1))]
    (layer,) = inspect(model, loss, batches, method="hesscale").layers
    for bits in (8, 4):
        low, step = w.min(), (w.max() - w.min()) / (2**bits - 1)
        rounded = low + ((w - low) / step).round() * step
        true = float((h * (rounded - w).square()).sum() / 2)
        assert layer.sensitivity[bits] == pytest.approx(true, rel=0.03)


def test_it_prints_as_a_table() -> None:
    model, batches = problem()
    lines = str(inspect(model, F.cross_entropy, batches)).splitlines()
    assert " ".join(lines[0].split()) == "layer weights trace 1% 25% median 75% 99% h < 0 h = 0 8 bits 4 bits"
    assert [line.split()[0] for line in lines[1:]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len({len(line) for line in lines}) == 1


def test_a_parameter_without_entries_has_no_row() -> None:
    model, batches = problem()
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, dtype=torch.float64)))
    assert len(inspect(model, F.cross_entropy, batches).layers) == 4


def test_what_is_refused() -> None:
    model, batches = problem()
    batches[0][0][0, 0] = torch.nan
    with pytest.raises(ValueError, match="look for inf or nan"):
        inspect(model, F.cross_entropy, batches)
    with pytest.raises(ValueError, match="gave no examples"):
        inspect(model, F.cross_entropy, [])
    with pytest.raises(ValueError, match="no parameter of the model requires grad"):
        inspect(nn.Tanh(), F.cross_entropy, batches)
    with pytest.raises(ValueError, match="belongs to another model"):
        inspect(model, diagonal={"weight": torch.ones(1)})


def test_pruned_weights_do_not_widen_the_range() -> None:
    model, batches = problem()
    with torch.no_grad():
        model[0].weight[0, 0] = 100.0
    mask = torch.ones_like(model[0].weight)
    mask[0, 0] = 0
    prune.custom_from_mask(model[0], "weight", mask)
    final = copy.deepcopy(problem()[0])
    with torch.no_grad():
        final[0].weight[0, 0] = 0.0
    (found,) = [layer for layer in inspect(model, F.cross_entropy, batches).layers if layer.name == "0.weight_orig"]
    h = hesscale.applications.diagonal_over(final, F.cross_entropy, batches)["0.weight"]
    w = final[0].weight.detach()
    step = float(w.max() - w.min()) / 255
    assert found.sensitivity[8] == pytest.approx(float((h * mask).sum()) * step**2 / 24, rel=1e-10)
