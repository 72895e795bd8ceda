"""Graphs that are no chains: residual and dense connections, shared and frozen parts, writes in place, many losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.rules import registered
from hesscale.rules.families import Coupled
from hesscale.testing import exact_diagonal


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def test_residual_connections_add_their_paths() -> None:
    """At x the identity adds s itself, and the branch what a branch alone would give."""
    x, w = leaf(3, 4), leaf(4, 4, seed=1)
    g, s = leaf(3, 4, seed=2).detach(), leaf(3, 4, seed=3).detach()
    (whole,) = hesscale.diagonal(x + torch.tanh(x @ w), x, g, s)
    (branch,) = hesscale.diagonal(torch.tanh(x @ w), x, g, s)
    torch.testing.assert_close(whole, s + branch)


def test_in_place_activations_and_sums() -> None:
    x, w = leaf(3, 4), leaf(4, 4, seed=1)

    def plain(t: Tensor) -> Tensor:
        return F.relu(t @ w + t).sin().square().sum()

    def in_place(t: Tensor) -> Tensor:
        h = t @ w
        h += t
        return F.relu_(h).sin().square_().sum()

    for ours, theirs in zip(hesscale.diagonal(in_place(x), (x, w)), hesscale.diagonal(plain(x), (x, w)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_writes_into_slices() -> None:
    x, w = leaf(3, 4), leaf(4, 4, seed=1)

    def written(t: Tensor) -> Tensor:
        h = t @ w
        h[:, :2] = torch.tanh(h[:, 2:])
        h[0] *= 2
        return h

    def joined(t: Tensor) -> Tensor:
        h = t @ w
        h = torch.cat([torch.tanh(h[:, 2:]), h[:, 2:]], 1)
        return torch.cat([h[:1] * 2, h[1:]])

    g, s = leaf(3, 4, seed=2).detach(), leaf(3, 4, seed=3).detach()
    found, expected = (hesscale.diagonal(f(x), (x, w), g, s) for f in (written, joined))
    torch.testing.assert_close(found, expected)


def test_a_coupled_write_into_a_slice_is_refused() -> None:
    x = leaf(3, 4)
    h = x.clone()
    h[1:].cumsum_(0)
    with pytest.raises(NotImplementedError, match="out of place"):
        hesscale.backward(h.square().sum())
    assert x.grad is None


def test_penalties_and_several_losses() -> None:
    """Parameters in the loss itself get the penalty's curvature on top."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    parameters = list(model.parameters())
    plain = hesscale.diagonal(F.cross_entropy(model(x), y), parameters)
    penalty = 0.3 * sum((p * p).sum() for p in parameters) + sum(p.pow(4).sum() for p in parameters)
    both = hesscale.diagonal(F.cross_entropy(model(x), y) + penalty, parameters)
    for with_it, without, p in zip(both, plain, parameters, strict=True):
        assert with_it is not None and without is not None
        torch.testing.assert_close(with_it, without + 0.6 + 12 * p.detach().square())


def test_tied_embeddings() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(7, 4).double()
    tokens, targets = torch.tensor([1, 3, 3, 6]), torch.tensor([2, 0, 5, 1])
    loss = F.cross_entropy(torch.tanh(table(tokens)) @ table.weight.t(), targets)
    hesscale.backward(loss)
    copy = table.weight.detach().clone().requires_grad_()
    untied = F.cross_entropy(torch.tanh(F.embedding(tokens, table.weight)) @ copy.t(), targets)
    read, written = hesscale.diagonal(untied, (table.weight, copy))
    assert read is not None and written is not None
    torch.testing.assert_close(table.weight.curvature, read + written)  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(wrap: str) -> None:
    torch.manual_seed(0)
    layer = getattr(nn.utils.parametrizations, wrap)(nn.Linear(4, 4).double())
    hesscale.backward(layer(torch.randn(5, 4, dtype=torch.float64)).square().mean())
    assert all(torch.isfinite(p.curvature).all() for p in layer.parameters())  # type: ignore[attr-defined]


def test_frozen_layers_carry_curvature_and_get_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    whole = hesscale.diagonal(model(x).square().mean(), list(model.parameters()))
    model[2].requires_grad_(False)
    hesscale.backward(model(x).square().mean())
    assert not hasattr(model[2].weight, "curvature")
    torch.testing.assert_close(model[0].weight.curvature, whole[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["exact", "sample"])
def test_operations_without_a_rule(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax without its rule: exactly what the rule gives, or that in the mean of many probes."""
    x = leaf(2, 3)
    g, s = leaf(2, 3, seed=2).detach(), leaf(2, 3, seed=3).detach()
    (expected,) = hesscale.diagonal(x.softmax(1), x, g, s)
    rows = {name: rule for name, rule in hesscale.rules.RULES._rows.items() if name != "SoftmaxBackward0"}
    monkeypatch.setattr(hesscale.rules.RULES, "_rows", rows)
    generator = torch.Generator().manual_seed(0)
    draws = 1 if missing == "exact" else 4000
    found = torch.stack(
        [hesscale.diagonal(x.softmax(1), x, g, s, missing=missing, generator=generator)[0] for _ in range(draws)]  # type: ignore[arg-type, misc]
    )
    assert expected is not None
    if missing == "exact":
        torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-10)
    else:
        error = (found.mean(0) - expected).abs()
        assert (error <= 5 * found.std(0) / draws**0.5 + 1e-12).all()


def test_fallbacks_speak_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(100, 100)
    rows = {name: rule for name, rule in hesscale.rules.RULES._rows.items() if name != "SoftmaxBackward0"}
    monkeypatch.setattr(hesscale.rules.RULES, "_rows", rows)
    with pytest.raises(NotImplementedError, match=r"10000 elements.*'sample'"):
        hesscale.backward(x.softmax(1).square().sum(), missing="exact")
    with pytest.raises(ValueError, match="generator"):
        hesscale.backward(x.softmax(1).square().sum(), missing="sample")
    with pytest.raises(ValueError, match="'raise', 'exact' or 'sample'"):
        hesscale.backward(x.softmax(1).square().sum(), missing="ignore")  # type: ignore[arg-type]
    assert x.grad is None


def test_exact_diagonal_agrees_on_a_small_residual_network() -> None:
    """The last layer behind a residual network is exact, whatever is before it."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    loss = F.cross_entropy(head(x + torch.relu(body(x))), torch.tensor([0, 1, 2, 0, 1, 2]))
    expected = exact_diagonal(loss, list(head.parameters()))
    torch.testing.assert_close(hesscale.diagonal(loss, list(head.parameters())), expected, rtol=1e-10, atol=1e-10)


def test_double_precision_targets_of_a_single_precision_model() -> None:
    """As with gradients, each tensor's curvature has its own dtype."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x, y = torch.randn(5, 3), torch.randn(5, 2, dtype=torch.float64)
    try:
        torch.autograd.grad(F.mse_loss(model(x), y), model.weight)
    except RuntimeError:
        pytest.skip("this torch gives no gradient either")
    hesscale.backward(F.mse_loss(model(x), y))
    assert model.weight.curvature.dtype is torch.float32  # type: ignore[attr-defined]
    torch.testing.assert_close(model.weight.curvature, (x.square().sum(0) / 5).expand(2, 3))  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits, F.huber_loss])
def test_empty_batches(loss: Any) -> None:
    model = nn.Linear(3, 2)
    hesscale.backward(loss(model(torch.randn(0, 3)), torch.rand(0, 2)))
    assert not model.weight.curvature.any()  # type: ignore[attr-defined]


def test_equal_elements_have_a_flat_deviation() -> None:
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    (found,) = hesscale.diagonal(x.std(1).sum(), x)
    assert found is not None
    assert torch.isfinite(found).all()


def test_weakly_coupled_writes_are_refused_as_well() -> None:
    base, a, b = leaf(3, 3), leaf(2, 3, seed=1), leaf(3, 3, seed=2)
    written = base.clone()
    written[:2].addmm_(a, b, alpha=1e-4)
    with pytest.raises(NotImplementedError, match="out of place"):
        hesscale.backward(written.square().sum())


TRANSPOSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a weight": lambda x, w: x @ w.t(),
    "a weight with a bias": lambda x, w: F.linear(x, w, x.new_ones(3)),
    "a weight and a scale": lambda x, w: torch.addmm(x.new_ones(3), x, w.t(), beta=0.5, alpha=-2.0),
    "an activation": lambda x, w: x @ torch.tanh(w).t(),
    "a weight in another order": lambda x, w: x @ w.t().contiguous(),
    "a transpose of a transpose": lambda x, w: x @ w.t().t().t(),
    "the left factor": lambda x, w: w @ x.t(),
    "the left factor, a weight": lambda x, w: w.t().t() @ x.t(),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("name", TRANSPOSES)
def test_curvature_finds_its_way_past_a_transpose(name: str, columns_first: bool, rows: int) -> None:
    w = leaf(5, 3, seed=1).detach().mT.requires_grad_() if columns_first else leaf(3, 5, seed=1)
    x = leaf(rows, 5, seed=2).detach()

    def loss() -> Tensor:
        return TRANSPOSES[name](x, w).exp().sum()

    hesscale.backward(loss())
    found = w.curvature  # type: ignore[attr-defined]
    (expected,) = exact_diagonal(loss(), [w])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert found.stride() == w.stride()
    torch.testing.assert_close(hesscale.diagonal(loss(), w)[0], expected, rtol=1e-10, atol=1e-12)


def test_curvature_stops_at_a_transpose_that_is_asked_for_or_used_twice() -> None:
    x, w = leaf(4, 5, seed=2).detach(), leaf(3, 5, seed=1)
    turned = w.t()
    first, second = (x @ turned).exp().sum(), (x @ turned).sin().sum()
    alone = [hesscale.diagonal(part, [turned, w], retain_graph=True) for part in (first, second)]
    for at_turned, at_w in alone:
        assert at_turned is not None and at_w is not None
        torch.testing.assert_close(at_turned.t(), at_w, rtol=0, atol=0)
    (expected,) = exact_diagonal(first + second, [w])
    hesscale.backward(first + second)
    torch.testing.assert_close(w.curvature, expected, rtol=1e-10, atol=1e-12)  # type: ignore[attr-defined]


class Doubled(torch.autograd.Function):
    """The identity, behind which the loss counts twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_function_changes_gradient_and_curvature_alike_a_hook_the_residual_only() -> None:
    """As docs/any-model.md says: torch does not tell that there is a hook, and hands on what it returns."""
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    first, second = torch.cos(x.detach()), -torch.sin(x.detach())

    def curvature(change: Callable[[Tensor], Tensor]) -> Tensor:
        (found,) = hesscale.diagonal(change(torch.sin(x)).square().sum(), x)
        return found

    def hooked(y: Tensor) -> Tensor:
        y.register_hook(lambda g: 2 * g)
        return y

    y = torch.sin(x.detach())
    assert_close(curvature(hooked), 2 * first.square() + second * (2 * 2 * y))
    with registered(Coupled(lambda node, s, g: None if s is None else 2 * s, linear=True), Doubled):
        assert_close(curvature(Doubled.apply), 2 * curvature(lambda y: y))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
