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


def with_log_softmax() -> nn.Module:
    return nn.Sequential(*mlp(), nn.LogSoftmax(1))


@pytest.mark.parametrize("method", ["ggn", "hesscale_gn", "hesscale", "hessian"])
def test_a_model_that_ends_in_log_softmax_is_the_same_model(method: str) -> None:
    """The loss begins at the log-softmax, whoever computes it."""
    torch.manual_seed(0)
    model = with_log_softmax().double()
    batch = BY_NAME["mlp"].batch
    logits = nn.Sequential(*[*model][:-1])
    found = hesscale.estimate(method, model, F.nll_loss, batch)
    expected = hesscale.estimate(method, logits, F.cross_entropy, batch)
    assert flat(expected).abs().sum() > 0.1
    torch.testing.assert_close(found, expected, **TIGHT)


def test_a_loss_that_bends_the_outputs_begins_there() -> None:
    """Squared log-probabilities: not linear, so the log-softmax is part of the network."""
    model = with_log_softmax().double()
    case = Case("", model, lambda y, t: F.mse_loss(y, torch.zeros_like(y)), BY_NAME["mlp"].batch)
    torch.testing.assert_close(estimate("ggn", case), reference.ggn(case).diagonal(), **TIGHT)


def normalized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 3)).double()


def by_differences(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """∂²L/∂p² from two gradients at p ± ε, entry by entry."""
    found, step = {}, 1e-5
    for name, p in model.named_parameters():
        entries = []
        for i in range(p.numel()):
            slopes = []
            for offset in (step, -step):
                with torch.no_grad():
                    p.view(-1)[i] += offset
                slopes.append(torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), p)[0].view(-1)[i])
                with torch.no_grad():
                    p.view(-1)[i] -= offset
            entries.append((slopes[0] - slopes[1]) / (2 * step))
        found[name] = torch.stack(entries).view(p.shape)
    return found


def test_second_derivatives_under_weight_norm() -> None:
    """Torch's double backward of its fused kernel is wrong."""
    torch.manual_seed(1)
    model, batch = normalized(), BY_NAME["mlp"].batch
    expected = by_differences(model, batch)
    found = hesscale.estimate("hessian", model, F.cross_entropy, batch)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    probes = hesscale.estimate("hutchinson", model, F.cross_entropy, batch, samples=3000)
    for name, p in expected.items():
        assert (probes[name] - p).norm() < 0.2 * p.norm(), name
    ours = hesscale.estimate("hesscale", model, F.cross_entropy, batch)
    compared = hesscale.testing.compare_with_exact(model, F.cross_entropy, batch)
    for name, p in expected.items():
        error = float((ours[name] - p).abs().sum() / p.abs().sum())
        assert compared[name].relative_error == pytest.approx(error, rel=1e-5, abs=1e-8), name


def test_a_graph_of_weight_norm_is_not_differentiated_twice() -> None:
    model, batch = normalized(), BY_NAME["mlp"].batch
    params = [*model.parameters()]
    loss = F.cross_entropy(model(batch[0]), batch[1])
    with pytest.raises(RuntimeError, match=r"double backward of weight_norm.*twice_differentiable"):
        hesscale.testing.exact_diagonal(loss, params)
    with pytest.raises(RuntimeError, match=r"double backward of weight_norm"):
        hesscale.AdaHessian(params).backward(loss)
    with hesscale.testing.twice_differentiable(model):
        plain = F.cross_entropy(model(batch[0]), batch[1])
    found = hesscale.testing.exact_diagonal(plain, params)
    torch.testing.assert_close([*found], [*by_differences(model, batch).values()], rtol=1e-6, atol=1e-8)
