"""rank=k against a slow reference: one backward pass for each example and column, and HesScale for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hesscale

from .networks import (
    CLASSES,
    LOSSES,
    NETWORKS,
    blocks,
    columns_one_by_one,
    flat,
    made,
    remainder,
)

APART = sorted(set(NETWORKS) - {"batch norm"})
SEPARATE = sorted(set(LOSSES) - {"two terms"})  # whose blocks have one list of eigenvalues


def reference(model: nn.Module, x: Tensor, loss: str, rank: int, method: str = "hesscale") -> Tensor:
    """Columns one by one, and a walk from the outputs that is seeded with what they leave of the diagonal."""
    y = model(x)
    h = blocks(LOSSES[loss], y)
    (g,) = torch.autograd.grad(LOSSES[loss](y), y, retain_graph=True)
    params = [*model.parameters()]
    carried = columns_one_by_one(model, y, h, rank)
    rest = hesscale.diagonal(y, params, g, remainder(h, rank), method=method)
    return flat(a + (0 if b is None else b) for a, b in zip(carried, rest, strict=True))


def ours(model: nn.Module, x: Tensor, loss: str, rank: int | str, method: str = "hesscale") -> Tensor:
    found = hesscale.diagonal(LOSSES[loss](model(x)), [*model.parameters()], method=method, rank=rank)  # type: ignore[arg-type]
    return flat(found)


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("name", APART)
def test_every_rank_is_that_of_single_examples_and_columns(name: str, rank: int, method: str) -> None:
    model, x = made(name)
    assert_equal(ours(model, x, "cross-entropy", rank, method), reference(model, x, "cross-entropy", rank, method))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("loss", SEPARATE)
def test_every_loss(loss: str, rank: int) -> None:
    model, x = made("mlp")
    if loss in ("squared error", "huber"):
        y = model(x)
        h = blocks(LOSSES[loss], y)
        total = flat(columns_one_by_one(model, y, h, CLASSES))
        ranks = [ours(model, x, loss, k, "hesscale_gn") for k in range(CLASSES + 1)]
        assert_equal(ranks[-1], total)  # axes of the same length: which of them comes first does not matter
        return
    assert_equal(ours(model, x, loss, rank), reference(model, x, loss, rank))


def gauss_newton(model: nn.Module, x: Tensor, loss: str) -> Tensor:
    y = model(x)
    whole = torch.autograd.functional.hessian(LOSSES[loss], y.detach()).reshape(y.numel(), y.numel())
    rows = [torch.autograd.grad(e, [*model.parameters()], retain_graph=True, allow_unused=True) for e in y.reshape(-1)]
    pairs = zip(model.parameters(), zip(*rows, strict=True), strict=True)
    jacobian = torch.cat(
        [torch.stack([torch.zeros_like(p) if g is None else g for g in each]).flatten(1) for p, each in pairs], 1
    )
    return torch.einsum("ki,kl,li->i", jacobian, whole, jacobian)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_columns_are_the_gauss_newton_diagonal_and_the_residual(name: str) -> None:
    """Also behind batch norm while it trains, where examples are mixed."""
    model, x = made(name)
    residual = ours(model, x, "cross-entropy", 0) - ours(model, x, "cross-entropy", 0, "hesscale_gn")
    exact = gauss_newton(model, x, "cross-entropy")
    assert_equal(ours(model, x, "cross-entropy", "full"), exact + residual)
    assert_equal(ours(model, x, "cross-entropy", "full", "hesscale_gn"), exact)


@pytest.mark.parametrize("loss", LOSSES)
def test_all_columns_of_every_loss(loss: str) -> None:
    model, x = made("shared")
    assert_equal(ours(model, x, loss, "full", "hesscale_gn"), gauss_newton(model, x, loss))
    assert_equal(ours(model, x, loss, CLASSES, "hesscale_gn"), gauss_newton(model, x, loss))


@pytest.mark.parametrize("name", ["mlp relu", "cnn relu"])
def test_all_columns_of_a_relu_network_are_the_hessian(name: str) -> None:
    model, x = made(name)
    exact = hesscale.testing.exact_diagonal(LOSSES["cross-entropy"](model(x)), [*model.parameters()])
    assert_equal(ours(model, x, "cross-entropy", "full"), flat(exact))


@pytest.mark.parametrize("name", NETWORKS)
def test_rank_zero_is_what_it_was(name: str) -> None:
    model, x = made(name)
    plain = hesscale.diagonal(LOSSES["cross-entropy"](model(x)), [*model.parameters()])
    assert torch.equal(ours(model, x, "cross-entropy", 0), flat(plain))
