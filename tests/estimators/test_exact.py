"""The exact diagonals against dense matrices, and the theorems that tie estimators to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscale
from hesscale.estimators import ESTIMATORS, batched_vjp

from . import reference
from .cases import BY_NAME, CASES, Case, mlp, numbers
from .reference import flat

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
ids = [case.name for case in CASES]
PROPAGATED = [case for case in CASES if case.has_rules]


def estimate(method: str, case: Case, **more: object) -> torch.Tensor:
    return flat(hesscale.estimate(method, case.model, case.loss_fn, case.batch, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_hessian_is_that_of_the_dense_matrix(case: Case) -> None:
    torch.testing.assert_close(estimate("hessian", case), reference.hessian(case).diagonal(), **TIGHT)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_ggn_is_that_of_the_dense_matrix(case: Case) -> None:
    torch.testing.assert_close(estimate("ggn", case), reference.ggn(case).diagonal(), **TIGHT)


def test_ggn_from_the_side_of_the_parameters() -> None:
    small = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    case = Case("wide batch", small, F.cross_entropy, (numbers(20, 2), torch.arange(20) % 3))
    torch.testing.assert_close(estimate("ggn", case), reference.ggn(case).diagonal(), **TIGHT)


@pytest.mark.parametrize("method", ["hessian", "ggn"])
def test_small_chunks_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = estimate(method, BY_NAME["cnn"])
    monkeypatch.setattr(batched_vjp, "_ELEMENTS_AT_ONCE", 1000)
    torch.testing.assert_close(estimate(method, BY_NAME["cnn"]), whole, **TIGHT)


@pytest.mark.parametrize("name", ["mlp-relu", "cnn-relu"])
def test_ggn_is_the_hessian_of_a_piecewise_linear_network(name: str) -> None:
    torch.testing.assert_close(estimate("ggn", BY_NAME[name]), estimate("hessian", BY_NAME[name]), **TIGHT)


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "ggn"])
@pytest.mark.parametrize("case", PROPAGATED, ids=lambda case: case.name)
def test_the_last_layer_is_exact(case: Case, method: str) -> None:
    names = [name for name, _ in case.model.named_parameters()][-2:]
    torch.testing.assert_close(estimate(method, case, params=names), estimate("hessian", case, params=names), **TIGHT)


@pytest.mark.parametrize("case", PROPAGATED, ids=lambda case: case.name)
@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
def test_propagated_ones_are_those_of_the_engine(case: Case, method: str) -> None:
    inputs, targets = case.batch
    outputs = case.model(inputs)
    more = {"output": outputs} if method == "hesscale_gn" else {}
    found = hesscale.diagonal(case.loss_fn(outputs, targets), list(case.model.parameters()), method=method, **more)  # type: ignore[arg-type]
    assert torch.equal(estimate(method, case), torch.cat([s.reshape(-1) for s in found if s is not None]))


@pytest.mark.parametrize("case", PROPAGATED, ids=lambda case: case.name)
def test_hesscale_is_closer_than_nothing(case: Case) -> None:
    exact = estimate("hessian", case)
    assert (estimate("hesscale", case) - exact).abs().sum() < exact.abs().sum()


def test_one_unit_wide_networks_are_exact() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1), nn.Sigmoid(), nn.Linear(1, 1)).double()
    case = Case("narrow", model, F.mse_loss, (numbers(4, 1), numbers(4, 1).flip(0)))
    torch.testing.assert_close(estimate("hesscale", case), estimate("hessian", case), **TIGHT)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_squared_gradient(case: Case) -> None:
    _, loss = reference.forward(case)
    grads = torch.autograd.grad(loss, list(case.model.parameters()))
    torch.testing.assert_close(
        estimate("squared_gradient", case), torch.cat([grad.reshape(-1) for grad in grads]).square(), **TIGHT
    )


def test_any_smooth_loss_has_a_gauss_newton_matrix() -> None:
    def coupled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(outputs.reshape(-1) * 2, 0) + (outputs.sum() - 1) ** 4 + targets.sum()

    case = Case("coupled", mlp().double(), coupled, (numbers(3, 3), torch.zeros(3)))
    torch.testing.assert_close(estimate("ggn", case), reference.ggn(case).diagonal(), **TIGHT)
    torch.testing.assert_close(estimate("hessian", case), reference.hessian(case).diagonal(), **TIGHT)


def test_a_linear_loss_of_a_linear_model_has_no_curvature() -> None:
    case = Case("linear", nn.Linear(3, 2).double(), lambda outputs, _: outputs.sum(), (numbers(4, 3), None))
    for method in ("hesscale", "hesscale_gn", "bl89", "hessian", "ggn", "hutchinson"):
        assert not estimate(method, case).any(), method


def test_unused_parameters_get_zeros() -> None:
    model = mlp().double()
    model.register_parameter("spare", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    case = Case("spare", model, F.cross_entropy, BY_NAME["mlp"].batch)
    for method in set(ESTIMATORS) - {"kfac"}:
        assert not hesscale.estimate(method, case.model, case.loss_fn, case.batch)["spare"].any(), method
