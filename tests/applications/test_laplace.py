"""Posteriors with a diagonal precision: what they are, what they predict, and how their prior is found."""

import functools
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.applications.laplace import Posterior, half_squared_error, laplace


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(outputs: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def classes(n: int = 12) -> list[tuple[Tensor, Tensor]]:
    x = draws(n, 4)
    return [*zip(x.split(5), x[:, :3].argmax(1).split(5), strict=True)]


def values(n: int = 12) -> list[tuple[Tensor, Tensor]]:
    x = draws(n, 4)
    return [*zip(x.split(5), (x[:, :2] @ draws(2, 2, seed=1)).split(5), strict=True)]


@pytest.mark.parametrize("method", ["hesscale_gn", "ggn", "hesscale", "hessian"])
def test_the_precision_is_curvature_of_all_examples_and_the_prior(method: str) -> None:
    """Batches of different sizes count by their examples; negative curvature counts as none."""
    model, data = network(), classes()
    found = laplace(model, F.cross_entropy, data, prior_precision=0.5, method=method)
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    whole = hesscale.estimate(method, model, F.cross_entropy, (x, y))
    for name, h in whole.items():
        torch.testing.assert_close(found.precision[name], 12 * h.clamp(min=0) + 0.5, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.variance[name] * found.precision[name], torch.ones_like(h))
    negative = sum(int((h < 0).sum()) for h in whole.values()) / sum(h.numel() for h in whole.values())
    assert found.clamped == pytest.approx(negative)
    assert (negative > 0) == (method in ("hesscale", "hessian"))
    assert found.loss == pytest.approx(float(F.cross_entropy(model(x), y).detach()))
    assert found.examples == 12


def test_hesscale_gn_is_the_default() -> None:
    model, data = network(), classes()
    ours, theirs = (laplace(model, F.cross_entropy, data, **how) for how in ({}, {"method": "hesscale_gn"}))  # type: ignore[arg-type]
    assert all(torch.equal(ours.curvature[name], theirs.curvature[name]) for name in ours.curvature)


def test_a_diagonal_computed_elsewhere() -> None:
    model, data = network(), classes()
    diagonal = {name: draws(*p.shape, seed=3) for name, p in model.named_parameters()}
    found = laplace(model, diagonal=diagonal, examples=7)
    for name, h in diagonal.items():
        torch.testing.assert_close(found.precision[name], 7 * h.clamp(min=0) + 1)
    with pytest.raises(ValueError, match="needs the loss"):
        found.log_marginal_likelihood()
    counted = laplace(model, F.cross_entropy, data, diagonal=diagonal)
    assert counted.examples == 12
    assert math.isfinite(counted.log_marginal_likelihood())


def test_a_linear_gaussian_model_is_exact() -> None:
    """One input at a time makes the Hessian diagonal: posterior, evidence and predictions in closed form."""
    x = torch.diag(torch.tensor([1.0, 2.0, -3.0, 0.5]).double()).repeat(3, 1)
    y = draws(12, 1, seed=5)
    tau, noise = 0.7, 0.3
    precision = (x.square().sum(0) / noise + tau).diag()
    mean = torch.linalg.solve(precision, (x.T @ y / noise)).T
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = mean
    found = laplace(
        model,
        half_squared_error,
        [(x, y)],
        likelihood="regression",
        prior_precision=tau,
        noise=noise,
        method="hesscale",
    )
    torch.testing.assert_close(found.precision["weight"][0], precision.diag(), rtol=1e-10, atol=1e-12)
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(12).double(), noise * torch.eye(12).double() + x @ x.T / tau
    ).log_prob(y[:, 0])
    assert found.log_marginal_likelihood() == pytest.approx(float(evidence), rel=1e-9)
    new = draws(5, 4, seed=6)
    predicted, variance = found.predict(new)
    torch.testing.assert_close(predicted, new @ mean.T)
    torch.testing.assert_close(variance, ((new @ precision.inverse()) * new).sum(1, keepdim=True) + noise)
    sampled, spread = found.predict(new, samples=20_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sampled, predicted, rtol=0, atol=0.03)
    torch.testing.assert_close(spread, variance, rtol=0.05, atol=0.01)


def test_the_likeliest_prior_is_where_the_evidence_is_largest() -> None:
    model = network()
    found = laplace(model, F.cross_entropy, classes())
    best = found.with_likeliest_prior()
    (tau,) = {float(value) for value in best.prior.values()}
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert best.log_marginal_likelihood() > found.with_prior(tau * factor).log_marginal_likelihood()
    each = found.with_likeliest_prior(each=True)
    assert len({float(value) for value in each.prior.values()}) == 4
    assert each.log_marginal_likelihood() > best.log_marginal_likelihood()


def test_a_prior_by_validation_has_the_smallest_loss_there() -> None:
    model, data = network(), classes(60)
    model[2].weight.data *= 5  # too sure of itself
    found = laplace(model, F.cross_entropy, data)
    grid = (1e-2, 1.0, 1e2, 1e4)
    best = found.with_validated_prior(data, grid=grid)
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    losses = {tau: float(F.nll_loss(found.with_prior(tau).predict(x).log(), y)) for tau in grid}
    assert float(best.prior["0.weight"]) == min(losses, key=lambda tau: losses[tau])


def test_functional_variance_is_the_jacobians() -> None:
    model, x = network(), draws(3, 4, seed=7)
    found = laplace(model, F.cross_entropy, classes())
    variance = torch.cat([v.flatten() for v in found.variance.values()])
    for n in range(3):
        rows = [torch.autograd.grad(model(x[n : n + 1])[0, c], [*model.parameters()]) for c in range(3)]
        j = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        torch.testing.assert_close(found.functional_variance(x)[n], (j * variance) @ j.T)
    spread = found.functional_variance(x).diagonal(dim1=1, dim2=2)
    wanted = (model(x).detach() / (1 + math.pi / 8 * spread).sqrt()).softmax(-1)
    torch.testing.assert_close(found.predict(x), wanted)


def test_a_certain_posterior_predicts_what_the_model_does() -> None:
    model, x = network(), draws(70, 4, seed=7)  # more than one chunk
    found = laplace(model, F.cross_entropy, classes(), prior_precision=1e14)
    for samples in (0, 3):
        torch.testing.assert_close(
            found.predict(x, samples=samples), model(x).detach().softmax(-1), rtol=1e-5, atol=1e-5
        )


def test_nothing_of_the_model_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = laplace(model, F.cross_entropy, classes())
    found.predict(draws(4, 4))
    found.predict(draws(4, 4), samples=2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and not hasattr(p, "curvature") for p in model.parameters())


def test_some_parameters_only() -> None:
    """A posterior of the last layer."""
    model = network()
    found = laplace(model, F.cross_entropy, classes(), params=["2.weight", "2.bias"])
    assert [*found.precision] == ["2.weight", "2.bias"]
    assert found.predict(draws(2, 4)).shape == (2, 3)
    assert found.predict(draws(2, 4), samples=2).shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": []}, "gave no examples"),
        ({"likelihood": "poisson"}, "unknown likelihood 'poisson': choose"),
        ({"prior_precision": 0.0}, "must be positive"),
        ({"noise": math.nan}, "must be positive"),
        ({"batches": [(draws(2, 4) * math.nan, torch.zeros(2, dtype=torch.long))]}, "not finite"),
        ({"batches": None, "diagonal": {}}, "how many examples was this diagonal averaged over"),
        ({"diagonal": {}}, "belongs to another model"),
        ({"method": "tea leaves"}, "unknown method"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laplace(network(), F.cross_entropy, **{"batches": classes(), **options})


def test_training_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        laplace(model, F.cross_entropy, classes())


def test_bad_priors_are_refused() -> None:
    found: Posterior = laplace(network(), F.cross_entropy, classes())
    with pytest.raises(ValueError, match="positive and finite: -1"):
        found.with_prior(-1.0)
    with pytest.raises(ValueError, match=r"no prior precision for 0.weight"):
        found.with_prior({"0.bias": 1.0})
    with pytest.raises(ValueError, match="gave no examples"):
        found.with_validated_prior([])
    flat = laplace(network(), diagonal={n: torch.zeros_like(p) for n, p in network().named_parameters()}, examples=3)
    with pytest.raises(ValueError, match="all zero"):
        flat.with_likeliest_prior()


def test_every_call_draws_afresh_unless_it_has_a_generator() -> None:
    found, x = laplace(network(), F.cross_entropy, classes()), draws(3, 4)
    assert not torch.equal(found.predict(x, samples=2), found.predict(x, samples=2))
    once, again = (found.predict(x, samples=2, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(once, again)


def test_batches_may_come_from_a_generator_with_progress(capsys: pytest.CaptureFixture[str]) -> None:
    found = laplace(network(), F.cross_entropy, iter(classes()), progress=True)
    assert found.examples == 12
    assert "3 batches" in capsys.readouterr().err
    laplace(network(), F.cross_entropy, classes(), progress=True)
    assert "3/3 batches" in capsys.readouterr().err


def test_shapes_of_a_regression_are_checked() -> None:
    with pytest.raises(ValueError, match=r"outputs have shape \(3, 1\), but targets \(3,\)"):
        half_squared_error(draws(3, 1), draws(3))
    flat = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    found = laplace(flat, half_squared_error, [(draws(5, 4), draws(5))], likelihood="regression")
    with pytest.raises(ValueError, match="use samples= instead"):
        found.predict(draws(2, 4))
    assert found.predict(draws(2, 4), samples=3)[0].shape == (2,)


def test_the_jacobians_of_one_chunk_are_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    original, alive = Posterior.jacobians, []

    def watched(self: Posterior, inputs: Tensor) -> Any:
        for outputs, jacobians in original(self, inputs, chunk=2):
            gone = [ref() is None for ref in alive[:-1]]  # the last is still a variable of the loop that reads it
            assert all(gone)
            alive.append(weakref.ref(jacobians["0.weight"]))
            yield outputs, jacobians

    found = laplace(network(), F.cross_entropy, classes())
    whole = found.predict(draws(8, 4))
    monkeypatch.setattr(Posterior, "jacobians", watched)
    torch.testing.assert_close(found.predict(draws(8, 4)), whole)
    assert len(alive) == 4


def test_a_model_that_is_never_wrong_can_be_validated() -> None:
    model = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1e4], [-1e4]]))
    data = [(torch.ones(40, 1, dtype=torch.float64), torch.zeros(40, dtype=torch.int64))]
    found = laplace(model, F.cross_entropy, data)
    assert found.with_validated_prior(iter(data), grid=(1e6, 1e8)).prior["weight"] == 1e6


@pytest.mark.parametrize(
    "loss_fn",
    [
        functools.partial(F.cross_entropy, ignore_index=0),
        functools.partial(functools.partial(F.cross_entropy, ignore_index=0), label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=0),
    ],
    ids=["partial", "partial of a partial", "module"],
)
def test_labels_that_the_loss_ignores_do_not_count(loss_fn: Any) -> None:
    data = classes()
    labels = torch.cat([y for _, y in data])
    assert laplace(network(), loss_fn, data).examples == int((labels != 0).sum()) < len(labels)
