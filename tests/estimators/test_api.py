"""The call itself: what goes in, what comes out, and that nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import hesscale
from hesscale.applications.laplace import laplace
from hesscale.applications.over_batches import derivatives_over, diagonal_over
from hesscale.estimators import ESTIMATORS

from .cases import BY_NAME, CASES, Case, mlp, numbers
from .reference import flat


@pytest.mark.parametrize("method", ESTIMATORS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_estimator_gives_every_parameter_a_finite_diagonal(case: Case, method: str) -> None:
    if method in ("hesscale", "hesscale_gn", "bl89") and not case.has_rules:
        pytest.skip("no rules yet")
    names = [name for name, _ in case.model.named_parameters()]
    if method == "kfac":
        names = names[-2:]
    found = hesscale.estimate(method, case.model, case.loss_fn, case.batch, params=names)
    assert list(found) == names
    for name, p in case.model.named_parameters():
        if name in found:
            assert found[name].shape == p.shape
            assert found[name].dtype == p.dtype
            assert found[name].isfinite().all()
            assert not found[name].requires_grad


def dropout_net() -> nn.Module:
    layers = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("method", ESTIMATORS)
def test_nothing_is_left_behind(method: str, training: bool) -> None:
    model = dropout_net().train(training)
    if method in ("hesscale", "hesscale_gn", "bl89") and not BY_NAME["batch-norm"].has_rules:
        pytest.skip("no rules yet")
    names = ["0.weight", "4.weight"]
    state, buffer = copy.deepcopy(model.state_dict()), model[1].running_mean  # type: ignore[index]
    random = torch.random.get_rng_state()
    with torch.no_grad():
        found = hesscale.estimate(method, model, F.cross_entropy, BY_NAME["mlp"].batch, params=names)
    assert all(s.isfinite().all() for s in found.values())
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model[1].running_mean is buffer  # type: ignore[index]
    assert model.training is training
    for p in model.parameters():
        assert p.grad is None
        assert not hasattr(p, "curvature")
    assert not any(module._forward_hooks for module in model.modules())


def test_nothing_is_left_behind_by_an_error() -> None:
    model = dropout_net()
    state = copy.deepcopy(model.state_dict())

    def fail(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hesscale.estimate("hessian", model, fail, BY_NAME["mlp"].batch)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_dropout_is_the_same_for_all_passes_of_one_estimate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    batch = BY_NAME["mlp"].batch
    both = [flat(hesscale.estimate(method, model, F.cross_entropy, batch)) for method in ("hessian", "ggn")]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-10)


def test_tied_parameters_appear_once_and_count_twice() -> None:
    layer = nn.Linear(3, 3, bias=False).double()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    found = hesscale.estimate("hessian", model, F.mse_loss, (numbers(2, 3), numbers(2, 3)))
    loss = F.mse_loss(model(numbers(2, 3)), numbers(2, 3))
    torch.testing.assert_close(found["0.weight"], hesscale.testing.exact_diagonal(loss, layer.weight)[0])
    assert list(found) == ["0.weight"]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(z).tanh()


def product(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.mse_loss(outputs[0] * outputs[1], targets)


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "hessian", "ggn", "hutchinson", "squared_gradient"])
def test_several_inputs_by_place_or_name_and_several_outputs(method: str) -> None:
    model = Two().double()
    x, z, targets = numbers(4, 3), numbers(4, 3).flip(0), numbers(4, 2)
    batches: list[tuple[Any, Any]] = [((x, z), targets), ({"z": z, "x": x}, targets)]
    first, second = (
        flat(hesscale.estimate(method, model, product, batch, generator=torch.Generator().manual_seed(0)))
        for batch in batches
    )
    assert torch.equal(first, second)


def test_over_a_loader_is_the_estimate_for_all_the_data() -> None:
    model, (x, y) = mlp().double(), BY_NAME["mlp"].batch
    seen: list[int] = []
    found = hesscale.estimate_over(
        "hesscale", model, F.cross_entropy, [(x[:3], y[:3]), (x[3:], y[3:])], progress=seen.append
    )
    torch.testing.assert_close(flat(found), flat(hesscale.estimate("hesscale", model, F.cross_entropy, (x, y))))
    assert seen == [1, 2]
    with pytest.raises(ValueError, match="no examples"):
        hesscale.estimate_over("hesscale", model, F.cross_entropy, [])


def weighted_loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, targets["labels"])


def test_batches_are_weighted_by_examples_not_by_fields() -> None:
    model, (x, y) = mlp().double(), BY_NAME["mlp"].batch
    whole = flat(hesscale.estimate("hesscale", model, F.cross_entropy, (x, y)))
    parts = [slice(0, 4), slice(4, 5)]
    loaders: list[tuple[Any, list[Any]]] = [
        (lambda o, t: F.cross_entropy(o, t["labels"]), [(x[part], {"labels": y[part]}) for part in parts]),
        (lambda o, t: F.cross_entropy(o, t[0]), [(x[part], (y[part], {"too": y[part]})) for part in parts]),
        (lambda o, t: F.cross_entropy(o, y[: len(o)]) if len(o) == 4 else F.cross_entropy(o, y[4:]),
         [(x[part], None) for part in parts]),
    ]  # fmt: skip
    for loss_fn, loader in loaders:
        torch.testing.assert_close(flat(hesscale.estimate_over("hesscale", model, loss_fn, loader)), whole)
    ragged = [(x[part], {"labels": y[part], "other": y[:2]}) for part in parts]
    with pytest.raises(ValueError, match=r"lengths \[2, 4\]\? Say so: size="):
        hesscale.estimate_over("hesscale", model, weighted_loss, ragged)
    found = hesscale.estimate_over("hesscale", model, weighted_loss, ragged, size=lambda batch: len(batch[0]))
    torch.testing.assert_close(flat(found), whole)


def test_what_is_no_pair_or_in_the_wrong_order_is_named() -> None:
    model, (x, y) = mlp().double(), BY_NAME["mlp"].batch
    with pytest.raises(TypeError, match=r"estimate_over\(method, model, loss_fn, loader\).*first, not a list"):
        hesscale.estimate_over([(x, y)], "hesscale", model, F.cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"estimate\(method, model, loss_fn, batch\).*first, not a Sequential"):
        hesscale.estimate(model, "hesscale", F.cross_entropy, (x, y))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pair \(inputs, targets\), not a dict; for batches b"):
        hesscale.estimate_over("hesscale", model, F.cross_entropy, [{"input": x, "labels": y}])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"not a tuple of length 3"):
        hesscale.estimate("hesscale", model, F.cross_entropy, (x, y, y))  # type: ignore[arg-type]
    batch = {"input": x, "labels": y}
    found = hesscale.estimate_over(
        "hesscale", model, F.cross_entropy, [({"input": b["input"]}, b["labels"]) for b in [batch]]
    )
    torch.testing.assert_close(found, hesscale.estimate("hesscale", model, F.cross_entropy, (x, y)))


def test_mistakes_are_named() -> None:
    model, batch = mlp().double(), BY_NAME["mlp"].batch
    with pytest.raises(ValueError, match=r"unknown method 'fisher': choose one of 'hesscale'.*'squared_gradient'"):
        hesscale.estimate("fisher", model, F.cross_entropy, batch)
    with pytest.raises(ValueError, match=r"no parameter 'weight'; it has 0\.weight"):
        hesscale.estimate("hesscale", model, F.cross_entropy, batch, params=["weight"])
    with pytest.raises(ValueError, match="samples must be at least 1"):
        hesscale.estimate("hutchinson", model, F.cross_entropy, batch, samples=0)
    with pytest.raises(ValueError, match=r"scalar tensor, not one of shape \(5,\)"):
        hesscale.estimate("hesscale", model, lambda y, t: F.cross_entropy(y, t, reduction="none"), batch)
    with pytest.raises(ValueError, match="does not depend on any parameter"):
        hesscale.estimate("hessian", model, lambda y, t: y.detach().sum(), batch)
    with pytest.raises(ValueError, match=r"do not require grad: 0\.weight"):
        hesscale.estimate("hessian", mlp().requires_grad_(False), F.cross_entropy, batch, params=["0.weight"])
    with pytest.raises(ValueError, match="no parameter of the model requires grad"):
        hesscale.estimate("hessian", mlp().requires_grad_(False), F.cross_entropy, batch)


@pytest.mark.parametrize("method", ESTIMATORS)
def test_means_over_many_batches_are_kept_in_single_precision(method: str) -> None:
    """In half precision a total that is hundreds of times its next term stands still."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    batch = torch.ones(1, 1).bfloat16(), torch.zeros(1, 1).bfloat16()
    one = hesscale.estimate(method, model, F.mse_loss, batch, generator=torch.Generator())["weight"]
    many = hesscale.estimate_over(method, model, F.mse_loss, [batch] * 1000, generator=torch.Generator())["weight"]
    assert one.dtype == many.dtype == torch.float32
    if method not in ("ggn_mc", "kfac"):  # these draw
        torch.testing.assert_close(many, torch.full((1, 1), 4.0 if method == "squared_gradient" else 2.0))
    else:  # 2 · χ² with one degree of freedom: its standard deviation is √8
        assert abs(float(many) - 2) < 5 * (8 / 1000) ** 0.5


def test_squared_gradients_in_half_precision_do_not_vanish() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    batch = torch.ones(1, 1, dtype=torch.float16), None
    found = hesscale.estimate("squared_gradient", model, lambda y, _: 2.0**-14 * y.sum(), batch)
    assert float(found["weight"]) == 2.0**-28


class Remembering(nn.Module):
    """With attributes of all kinds that a forward pass sets."""

    cached, length = None, 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.length < len(x):
            self.length, self.cached = len(x), torch.ones(len(x), 1)
        self.hidden = self.last = self.linear(x)
        return self.hidden * self.cached


@pytest.mark.parametrize("method", ESTIMATORS)
def test_no_graph_is_left_in_a_pruned_model(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    batch = torch.randn(5, 3), torch.randint(2, (5,))
    with torch.no_grad():
        model(batch[0])
    masked = model[0].weight
    hesscale.estimate(method, model, F.cross_entropy, batch, params=["2.weight", "2.bias"])
    assert model[0].weight is masked
    copy.deepcopy(model)
    prune.remove(model[0], "weight")


def test_what_a_model_remembers_without_a_graph_stays_together() -> None:
    model = Remembering()
    for rows in (2, 5):
        hesscale.estimate("hessian", model, F.cross_entropy, (torch.randn(rows, 2), torch.randint(2, (rows,))))
        assert model.hidden is None and not hasattr(model, "last")
        assert model.length == rows and model.cached is not None and len(model.cached) == rows
    copy.deepcopy(model)


def of_model_and_batch(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


WRONG_SIGNATURES: dict[str, Any] = {
    "of model and batch": of_model_and_batch,
    "of three": lambda outputs, targets, weights: outputs.sum(),
    "of one": lambda outputs: outputs.sum(),
}
CALLS: dict[str, Callable[..., Any]] = {
    "estimate": lambda *call: hesscale.estimate("hesscale", *call),
    "estimate_over": lambda model, loss_fn, batch: hesscale.estimate_over("ggn", model, loss_fn, [batch]),
    "compare_with_exact": hesscale.testing.compare_with_exact,
    "laplace": lambda model, loss_fn, batch: laplace(model, loss_fn, [batch]),
    "prune": lambda model, loss_fn, batch: diagonal_over(model, loss_fn, [batch]),
    "gradients": lambda model, loss_fn, batch: derivatives_over(model, loss_fn, [batch]),
}


@pytest.mark.parametrize("loss_fn", WRONG_SIGNATURES.values(), ids=WRONG_SIGNATURES.keys())
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_loss_function_of_other_arguments_is_told_its_own(call: Callable[..., Any], loss_fn: Any) -> None:
    batch = torch.randn(5, 3), torch.randint(2, (5,))
    with pytest.raises(TypeError, match=r"loss_fn\(outputs, targets\).*not as loss_fn\(model, batch\): "):
        call(nn.Linear(3, 2), loss_fn, batch)


def test_errors_within_a_loss_function_are_its_own() -> None:
    def with_an_error(outputs: Tensor, targets: Tensor) -> Tensor:
        return len(outputs) + len(0)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)"):
        hesscale.estimate("hesscale", nn.Linear(3, 2), with_an_error, (torch.randn(5, 3), torch.zeros(5)))
