"""The backend for laplace-torch, and our posteriors beside theirs; where that package is installed."""

import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hesscale
from hesscale.applications.laplace import half_squared_error, laplace

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture(scope="module")
def theirs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("laplace", reason="pip install 'hesscale[laplace]'", exc_type=ImportError)


def network(likelihood: str) -> nn.Sequential:
    torch.manual_seed(0)
    outputs = 3 if likelihood == "classification" else 2
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def data_of(likelihood: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1) if likelihood == "classification" else x[:, :2] * 2


LOSSES = {"classification": F.cross_entropy, "regression": half_squared_error}


def fitted(theirs: Any, likelihood: str, backend: Any = None, subset: str = "all", **how: Any) -> tuple[nn.Module, Any]:
    model = network(likelihood)
    options = {} if backend is None else {"backend": backend, "backend_kwargs": how}
    found = theirs.Laplace(
        model, likelihood, subset_of_weights=subset, hessian_structure="diag", prior_precision=0.5, **options
    )
    found.fit(DataLoader(TensorDataset(*data_of(likelihood)), batch_size=6))
    return model, found


def backend() -> Any:
    from hesscale.applications.laplace_torch import HesScaleBackend

    return HesScaleBackend


@pytest.mark.parametrize("likelihood", LOSSES)
def test_the_exact_ggn_is_theirs(theirs: Any, likelihood: str) -> None:
    _, own = fitted(theirs, likelihood)
    _, ours = fitted(theirs, likelihood, backend(), method="ggn")
    torch.testing.assert_close(ours.posterior_precision, own.posterior_precision, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.log_marginal_likelihood(), own.log_marginal_likelihood(), rtol=1e-6, atol=1e-6)
    x = data_of(likelihood)[0]
    for mine, other in zip(_as_tuple(ours(x)), _as_tuple(own(x)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("likelihood", LOSSES)
def test_the_last_layer_of_hesscale_gn_is_theirs(theirs: Any, likelihood: str) -> None:
    """By one argument; below the last layer HesScale is an approximation of its own."""
    _, own = fitted(theirs, likelihood, subset="last_layer")
    _, ours = fitted(theirs, likelihood, backend(), subset="last_layer")
    torch.testing.assert_close(ours.posterior_precision, own.posterior_precision, rtol=1e-6, atol=1e-6)
    _, whole = fitted(theirs, likelihood, backend())
    size = len(own.posterior_precision)
    torch.testing.assert_close(whole.posterior_precision[-size:], own.posterior_precision, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("likelihood", LOSSES)
def test_our_posterior_is_theirs(theirs: Any, likelihood: str) -> None:
    """Precision, evidence, predictions."""
    model, own = fitted(theirs, likelihood)
    x, y = data_of(likelihood)
    found = laplace(model, LOSSES[likelihood], [(x, y)], likelihood=likelihood, prior_precision=0.5, method="ggn")
    precision = torch.cat([value.flatten() for value in found.precision.values()])
    torch.testing.assert_close(precision, own.posterior_precision, rtol=1e-6, atol=1e-6)
    assert found.log_marginal_likelihood() == pytest.approx(float(own.log_marginal_likelihood()), rel=1e-6)
    if likelihood == "classification":
        torch.testing.assert_close(found.predict(x), own(x, link_approx="probit"), rtol=1e-6, atol=1e-6)
    else:
        mean, covariance = own(x)
        torch.testing.assert_close(found.predict(x)[0], mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.functional_variance(x), covariance, rtol=1e-6, atol=1e-6)


def test_options_reach_the_estimate_and_nothing_is_negative(theirs: Any) -> None:
    model, ours = fitted(theirs, "classification", backend(), method="hesscale", rank=2)
    batch = data_of("classification")
    found = hesscale.estimate("hesscale", model, lambda f, y: F.cross_entropy(f, y, reduction="sum"), batch, rank=2)
    parts = [
        hesscale.estimate("hesscale", model, lambda f, y: F.cross_entropy(f, y, reduction="sum"), (x, y), rank=2)
        for x, y in zip(*(t.split(6) for t in batch), strict=True)
    ]
    wanted = sum(torch.cat([h.flatten() for h in part.values()]).clamp(min=0) for part in parts)
    torch.testing.assert_close(ours.posterior_precision, wanted + 0.5)
    assert any((h < 0).any() for h in found.values())


def test_a_subnetwork_may_be_chosen(theirs: Any) -> None:
    model = network("classification")
    indices = torch.tensor([0, 5, 40])
    found = backend()(model, "classification", subnetwork_indices=indices)
    whole = backend()(model, "classification")
    x, y = data_of("classification")
    torch.testing.assert_close(found.diag(x, y)[1], whole.diag(x, y)[1][indices])


@pytest.mark.parametrize("likelihood", LOSSES)
def test_a_subnetwork_is_fitted_and_predicts(theirs: Any, likelihood: str) -> None:
    model, indices = network(likelihood), torch.tensor([0, 5, 40])
    how = {"subset_of_weights": "subnetwork", "subnetwork_indices": indices, "hessian_structure": "diag"}
    ours, own = (
        theirs.Laplace(model, likelihood, **how, **options)
        for options in ({"backend": backend(), "backend_kwargs": {"method": "ggn"}}, {})
    )
    for one in (ours, own):
        one.fit(DataLoader(TensorDataset(*data_of(likelihood)), batch_size=6))
    torch.testing.assert_close(ours.posterior_precision, own.posterior_precision, rtol=1e-6, atol=1e-6)
    x = data_of(likelihood)[0]
    for mine, other in zip(_as_tuple(ours(x)), _as_tuple(own(x)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_whole_matrices_are_refused(theirs: Any, structure: str) -> None:
    found = theirs.Laplace(
        network("classification"),
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        backend=backend(),
    )
    with pytest.raises(NotImplementedError, match="pass hessian_structure='diag'"):
        found.fit(DataLoader(TensorDataset(*data_of("classification")), batch_size=6))


def test_without_it_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hesscale.applications.laplace_torch", raising=False)
    for name in [name for name in sys.modules if name == "laplace" or name.startswith("laplace.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs laplace-torch: pip install 'hesscale\[laplace\]'"):
        backend()


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
