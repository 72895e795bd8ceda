"""What a posterior makes of data, losses and models that are not the plainest: counted rightly, or refused."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from hesscale.applications.laplace import half_squared_error, laplace

from .test_laplace import classes, draws, network, values


def ones_like(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.ones_like(p) for name, p in model.named_parameters()}


def test_examples_are_counted_without_a_loss() -> None:
    model = network()
    found = laplace(model, batches=classes(), diagonal=ones_like(model))
    assert found.examples == 12
    assert all((precision == 13).all() for precision in found.precision.values())
    with pytest.raises(ValueError, match="needs the loss"):
        found.log_marginal_likelihood()


@pytest.mark.parametrize("loss_fn", [None, F.cross_entropy])
@pytest.mark.parametrize("batches", [[], iter([]), [(draws(0, 4), torch.zeros(0, dtype=torch.long))]])
def test_a_loader_without_examples_is_refused(loss_fn: Any, batches: Any) -> None:
    with pytest.raises(ValueError, match="the loader gave no examples"):
        laplace(network(), loss_fn, batches, diagonal=ones_like(network()))


@pytest.mark.parametrize("examples", [-5, 0, math.nan, math.inf])
def test_examples_are_a_positive_number(examples: Any) -> None:
    with pytest.raises(ValueError, match="examples must be a positive number, not"):
        laplace(network(), diagonal=ones_like(network()), examples=examples)


class Named(nn.Module):
    """A model whose output, or the two halves of it, are in a mapping."""

    def __init__(self, model: nn.Module, *, halves: bool) -> None:
        super().__init__()
        self.model, self.halves = model, halves

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.model(x)
        return {"left": y[:, :1], "right": y[:, 1:]} if self.halves else {"both": y}


@pytest.mark.parametrize("halves", [False, True])
def test_the_evidence_of_a_regression_with_named_outputs(halves: bool) -> None:
    """The same as with a tensor, its constant ½ log 2πσ² per number included."""
    plain, x, y = nn.Linear(4, 3).double(), draws(11, 4), draws(11, 3, seed=2)

    def loss_fn(outputs: dict[str, Tensor], targets: Any) -> Tensor:
        return half_squared_error(
            *(torch.cat([*o.values()], 1) if isinstance(o, dict) else o for o in (outputs, targets))
        )

    targets = {"left": y[:, :1], "right": y[:, 1:]} if halves else y
    found = laplace(Named(plain, halves=halves), loss_fn, [(x, targets)], likelihood="regression", noise=0.25)
    wanted = laplace(plain, half_squared_error, [(x, y)], likelihood="regression", noise=0.25)
    assert found.outputs == wanted.outputs == 3
    assert found.log_marginal_likelihood() == pytest.approx(wanted.log_marginal_likelihood(), rel=1e-12)


@pytest.mark.parametrize("shape", [(11, 1), (11,)])
def test_a_single_logit_is_refused(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 1), *([nn.Flatten(0)] if len(shape) == 1 else [])).double()
    bits = torch.ones(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match="end in two logits, and train it with cross_entropy"):
        laplace(model, F.binary_cross_entropy_with_logits, [(draws(11, 4), bits)])


def test_a_single_logit_is_refused_where_it_is_first_seen() -> None:
    model, x = nn.Linear(4, 1).double(), draws(5, 4)
    found = laplace(model, diagonal=ones_like(model), examples=11)
    for predict in (found.predict, lambda x: found.predict(x, samples=3)):
        with pytest.raises(ValueError, match="end in two logits, and train it with cross_entropy"):
            predict(x)
    with pytest.raises(ValueError, match="end in two logits, and train it with cross_entropy"):
        found.with_validated_prior([(x, torch.zeros(5, dtype=torch.long))])


def pruned() -> nn.Sequential:
    model = network()
    prune.random_unstructured(model[0], "weight", amount=0.5)
    return model


def test_masked_weights_count_as_zeros() -> None:
    """Evidence, prior and predictions are those of a dense model with zeros there, which no curvature holds."""
    model, x = pruned(), draws(5, 4, seed=8)
    dense = network()
    dense.load_state_dict({"0.weight": model[0].weight.detach(), "0.bias": model[0].bias, **parts(model, "2.")})
    mask = model[0].weight_mask
    found = laplace(model, F.cross_entropy, classes())
    diagonal = {name.replace("_orig", ""): c / 12 for name, c in found.curvature.items()}
    assert not diagonal["0.weight"][mask == 0].any()
    wanted = laplace(dense, F.cross_entropy, classes(), diagonal=diagonal)
    given = laplace(
        model, F.cross_entropy, classes(), diagonal={**diagonal, "0.weight_orig": diagonal["0.weight"] + 1 - mask}
    )
    for ours in (found, given):
        assert ours.log_marginal_likelihood() == pytest.approx(wanted.log_marginal_likelihood(), rel=1e-12)
        best, theirs = ours.with_likeliest_prior(), wanted.with_likeliest_prior()
        assert float(best.prior["0.bias"]) == pytest.approx(float(theirs.prior["0.bias"]), rel=1e-12)
        (f, js), (g, ks) = *ours.jacobians(x), *wanted.jacobians(x)
        torch.testing.assert_close(f, g)
        torch.testing.assert_close(js["0.weight_orig"], ks["0.weight"] * mask.flatten())
    held = laplace(model, F.cross_entropy, classes(), prior_precision=1e14)
    torch.testing.assert_close(held.predict(x, samples=2), model(x).detach().softmax(-1), rtol=1e-5, atol=1e-5)


def parts(model: nn.Module, start: str) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if name.startswith(start)}


def test_a_shared_weight_counts_where_one_user_keeps_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
    model[1].weight = model[0].weight
    prune.custom_from_mask(model[0], "weight", torch.zeros(4, 4))
    (name,) = dict(model.named_parameters())
    found = laplace(model, diagonal={name: torch.ones(4, 4).double()}, examples=3)
    assert torch.equal(found.mean[name], model[1].weight)


@pytest.mark.parametrize("samples", [0, 3])
def test_a_pruned_model_is_left_with_its_own_weights(samples: int) -> None:
    model = pruned()
    before = model[0].weight
    laplace(model, F.cross_entropy, classes(), diagonal=ones_like(model)).predict(draws(2, 4), samples=samples)
    assert model[0].weight is before
    torch.testing.assert_close(before, model[0].weight_orig * model[0].weight_mask, rtol=0, atol=0)


class Positions(nn.Module):
    """Classes [N, C, T] of inputs [N, T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.each = network()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.each(x).movedim(-1, 1)
        return found


def flattened(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@pytest.mark.parametrize(
    ("model", "loss_fn", "ignored"),
    [
        (Positions(), F.cross_entropy, -100),
        (Positions(), nn.CrossEntropyLoss(ignore_index=1), 1),
        (network(), flattened, -100),
    ],
)
@pytest.mark.parametrize("method", ["hesscale_gn", "hessian"])
def test_every_label_of_a_position_is_an_example(model: nn.Module, loss_fn: Any, ignored: int, method: str) -> None:
    """As if positions were flattened by hand; batches differ in length and in labels that do not count."""
    x = [draws(4, 5, 4), draws(3, 2, 4, seed=1), draws(1, 2, 4, seed=2)]
    y = [part[..., :3].argmax(-1) for part in x]
    y[0][0, 1:] = ignored
    y[2][:] = ignored
    found = laplace(model, loss_fn, [*zip(x, y, strict=True)], method=method)
    each = model.each if isinstance(model, Positions) else model
    labels = torch.cat([part.flatten() for part in y])
    flat, labels = torch.cat([part.flatten(0, 1) for part in x])[labels != ignored], labels[labels != ignored]
    wanted = laplace(each, F.cross_entropy, [(flat, labels)], method=method)
    assert found.examples == wanted.examples == len(labels)
    assert found.log_marginal_likelihood() == pytest.approx(wanted.log_marginal_likelihood(), rel=1e-10)
    with pytest.raises(ValueError, match="which dimension of the outputs is that of classes"):
        found.predict(x[0], samples=2)
    assert found.draw(x[0], samples=2).shape[:2] == (2, 4)


def test_probabilities_of_classes_are_one_example_each() -> None:
    hot = [(x, F.one_hot(y, 3).double()) for x, y in classes()]
    assert laplace(network(), F.cross_entropy, hot).examples == 12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("method", ["hesscale_gn", "ggn"])
def test_half_precision_is_near_float64(dtype: torch.dtype, likelihood: str, method: str) -> None:
    model = network(outputs=3 if likelihood == "classification" else 2).to(dtype)
    exact = copy.deepcopy(model).double()
    classify = likelihood == "classification"
    loss_fn, data = (F.cross_entropy, classes()) if classify else (half_squared_error, values())
    low = [(x.to(dtype), y if classify else y.to(dtype)) for x, y in data]
    high = [(x.double(), y if classify else y.double()) for x, y in low]
    # 1e-6 as the prior precision is where float16 cannot hold precision / prior
    ours, theirs = (
        laplace(m, loss_fn, d, likelihood=likelihood, prior_precision=1e-6, method=method)
        for m, d in ((model, low), (exact, high))
    )
    assert ours.log_marginal_likelihood() == pytest.approx(theirs.log_marginal_likelihood(), rel=2e-2)
    ours, theirs = ours.with_prior(10.0), theirs.with_prior(10.0)
    x = draws(5, 4, seed=9).to(dtype)
    for found, wanted in zip(parted(ours.predict(x)), parted(theirs.predict(x.double())), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=3e-2, atol=3e-2)
    assert all(part.isfinite().all() for part in parted(ours.predict(x, samples=3)))


def parted(predicted: Any) -> tuple[Tensor, ...]:
    return predicted if isinstance(predicted, tuple) else (predicted,)


def test_a_given_diagonal_keeps_its_precision_beside_a_half_model() -> None:
    model = network().half()
    diagonal = {name: torch.full(p.shape, 1e-9) for name, p in model.named_parameters()}
    found = laplace(model, diagonal=diagonal, examples=1000)
    torch.testing.assert_close(found.curvature["0.bias"], torch.full((6,), 1e-6))


class Attends(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, dropout=dropout)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.attention(x, x, x)[0])
        return found


class Recurs(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cells = nn.GRU(4, 3, num_layers=2, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cells(x)[0]
        return found


@pytest.mark.parametrize("make", [Attends, Recurs, lambda p: nn.Sequential(nn.Linear(4, 3), nn.Dropout(p))])
def test_any_module_in_training_mode_is_refused(make: Any) -> None:
    model = make(0.5).double().eval()
    found = laplace(model, diagonal=ones_like(model), examples=3)
    for module in [*model.children()]:
        module.train()  # the model itself is not in training mode
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        laplace(model, diagonal=ones_like(model), examples=3)
    for samples in (0, 2):
        with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
            found.predict(draws(2, 4), samples=samples)
    model.eval()
    assert found.predict(draws(2, 4), samples=2).shape == (2, 3)


@pytest.mark.parametrize("make", [Attends, Recurs])
def test_training_mode_without_dropout_is_no_matter(make: Any) -> None:
    model = make(0.0).double().train()
    assert laplace(model, diagonal=ones_like(model), examples=3).predict(draws(2, 4), samples=2).shape == (2, 3)


def test_the_variance_of_samples_is_unbiased() -> None:
    found = laplace(network(2), half_squared_error, values(), likelihood="regression", noise=0.5)
    x, seeded = draws(3, 4), torch.Generator
    outputs = found.draw(x, samples=2, generator=seeded().manual_seed(0))
    _, variance = found.predict(x, samples=2, generator=seeded().manual_seed(0))
    torch.testing.assert_close(variance, 0.5 * (outputs[0] - outputs[1]).square() + 0.5)
    for samples in (1, -2):
        with pytest.raises(ValueError, match="samples must be 2 or more for a variance"):
            found.predict(x, samples=samples)


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_the_scale_of_a_squared_error_is_right(outputs: int) -> None:
    """``mse_loss`` is taken for half the squared error; what cannot be known by its name is refused."""
    data = [(x, x[:, :1].repeat(1, outputs)) for x, _ in classes()]
    model = network(outputs)
    wanted = laplace(model, half_squared_error, data, likelihood="regression")
    for loss_fn in (F.mse_loss, nn.MSELoss(), nn.MSELoss(reduction="sum")):
        found = laplace(model, loss_fn, data, likelihood="regression")
        assert found.log_marginal_likelihood() == wanted.log_marginal_likelihood()
        assert torch.equal(found.variance["0.weight"], wanted.variance["0.weight"])
    with pytest.raises(ValueError, match="for regression pass half_squared_error"):
        laplace(model, lambda f, y: ((f - y) ** 2).sum(), data, likelihood="regression")


def test_a_squared_error_of_large_outputs_fits_half_precision() -> None:
    outputs = torch.full((4000, 2), 10.0, dtype=torch.float16)
    assert half_squared_error(outputs, torch.zeros_like(outputs)) == 100


def test_size_says_how_many_examples_a_batch_has() -> None:
    found = laplace(network(), F.cross_entropy, classes(), size=lambda batch: 10 * len(batch[1]))
    wanted = laplace(network(), F.cross_entropy, classes(), examples=120)
    assert found.examples == 120
    assert torch.allclose(found.variance["0.weight"], wanted.variance["0.weight"])
