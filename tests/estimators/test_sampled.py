"""Sampled estimators: unbiased, with errors that fall like 1/√samples, for every likelihood they know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

import hesscale
from hesscale.columns import sampled
from hesscale.columns.sampled import Draws, sampled_gauss_newton
from hesscale.estimators import ESTIMATORS

from . import reference
from .cases import BY_NAME, Case, mlp, numbers
from .reference import flat


def draw(method: str, case: Case, samples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return flat(hesscale.estimate(method, case.model, case.loss_fn, case.batch, samples=samples, generator=generator))


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "batch-norm", "attention"])
@pytest.mark.parametrize("method", ["hutchinson", "ggn_mc"])
def test_errors_fall_like_one_over_the_root_of_samples(method: str, name: str) -> None:
    case = BY_NAME[name]
    exact = (reference.hessian if method == "hutchinson" else reference.ggn)(case).diagonal()
    few, many = (
        sum(relative(draw(method, case, samples, seed), exact) for seed in range(8)) / 8 for samples in (8, 512)
    )
    assert 4.5 < few / many < 14  # √64 = 8, give or take the noise of eight runs


def test_hutchinson_has_the_variance_that_theory_gives() -> None:
    case = BY_NAME["mlp"]
    hessian = reference.hessian(case)
    expected = hessian.fill_diagonal_(0).square().sum()  # Σ_i Σ_{j≠i} H_ij²
    exact = reference.hessian(case).diagonal()
    found = torch.stack([(draw("hutchinson", case, 1, seed) - exact).square().sum() for seed in range(300)]).mean()
    torch.testing.assert_close(found, expected, rtol=0.15, atol=0)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.3 * F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 2.0, 0.5]).double(), ignore_index=2)


def by_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return (F.cross_entropy(outputs, targets, reduction="none") * torch.arange(1.0, 6.0).double()).sum()


def by_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(outputs, 1), targets)


def fixed_variance(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.GaussianNLLLoss()(outputs, targets, torch.full_like(outputs, 0.7))


LABELS, VALUES = torch.tensor([0, 1, 2, 1, 0]), numbers(5, 3)
BITS = (VALUES > 0).double()
LOSSES: list[tuple[str, Callable[..., Any], Tensor]] = [
    ("cross_entropy", F.cross_entropy, LABELS),
    ("module", nn.CrossEntropyLoss(reduction="sum"), LABELS),
    ("partial", functools.partial(F.cross_entropy, label_smoothing=0.2), LABELS),
    ("soft targets", F.cross_entropy, VALUES.softmax(1)),
    ("weighted, ignored, scaled", weighted, LABELS),
    ("weights by example", by_example, LABELS),
    ("nll_loss", by_nll, LABELS),
    ("mse", nn.MSELoss(), VALUES),
    ("half the sum of squares", lambda y, t: F.mse_loss(y, t, reduction="sum") / 2, VALUES),
    ("bce", nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 1.0, 0.5]).double()), BITS),
    ("gaussian", fixed_variance, VALUES),
]


@pytest.mark.parametrize("loss_fn, targets", [row[1:] for row in LOSSES], ids=[row[0] for row in LOSSES])
def test_every_likelihood_is_recognized_and_sampled_without_bias(loss_fn: Any, targets: Tensor) -> None:
    """E[vvᵀ] is the whole Hessian at the outputs, and what comes of it at the parameters the Gauss-Newton diagonal."""
    outputs = numbers(5, 3).requires_grad_()
    hessian = torch.autograd.functional.hessian(lambda y: loss_fn(y, targets), outputs).reshape(15, 15)
    draws, generator = Draws(loss_fn(outputs * 1.0, targets)), torch.Generator().manual_seed(0)
    vectors = draws(60000, generator)[0].flatten(1)
    assert relative(vectors.T @ vectors / len(vectors), hessian) < 0.025
    torch.manual_seed(5)
    case = Case("", mlp().double(), loss_fn, (numbers(5, 3), targets))
    exact = reference.ggn(case).diagonal()
    assert relative(draw("ggn_mc", case, 20000), exact) < 0.025


def test_a_predicted_variance_is_sampled_too() -> None:
    """The Fisher information of N(μ, v): 1/v for μ, 1/2v² for v."""

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.gaussian_nll_loss(outputs[:, 0], targets, outputs[:, 1])

    model = nn.Linear(2, 2).double()
    nn.init.constant_(model.bias, 2.0)
    case = Case("", model, loss_fn, (numbers(4, 2), numbers(4)))
    mean, var = (column.unsqueeze(1) for column in model(case.batch[0]).detach().T)
    squares = case.batch[0].square()
    expected = torch.cat([(squares / var).mean(0), (squares / (2 * var**2)).mean(0)])
    assert mean.shape == var.shape
    assert relative(draw("ggn_mc", case, 40000)[:4], expected) < 0.03


def test_positions_are_examples_of_their_own() -> None:
    """Class scores for every pixel: [N, C, H, W]."""
    model = nn.Conv2d(2, 3, 1).double()
    case = Case("", model, F.cross_entropy, (numbers(2, 2, 2, 2), torch.tensor([[[0, 1], [2, 2]], [[1, 0], [0, 1]]])))
    assert relative(draw("ggn_mc", case, 20000), reference.ggn(case).diagonal()) < 0.03


@pytest.mark.parametrize("name", ["cnn", "batch-norm", "attention", "recurrent"])
def test_examples_are_kept_apart_even_where_they_mix(name: str) -> None:
    """The same numbers as one pass for each example, with all others' draws set to zero."""
    case = BY_NAME[name]
    _, loss = reference.forward(case)
    params = list(case.model.parameters())
    found = sampled_gauss_newton(loss, params, generator=torch.Generator().manual_seed(0), apart=True)
    draws = Draws(loss)
    ((v,),) = draws(1, torch.Generator().manual_seed(0))
    expected = [torch.zeros_like(p) for p in params]
    for n in range(len(v)):
        alone = torch.zeros_like(v)
        alone[n] = v[n]
        pulled = torch.autograd.grad([GradientEdge(*edge) for edge in draws.edges], params, [alone], retain_graph=True)
        for total, g in zip(expected, pulled, strict=True):
            total += g.square()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["hutchinson", "ggn_mc", "kfac"])
def test_a_generator_makes_draws_repeatable_and_moves_on(method: str) -> None:
    case = BY_NAME["mlp"]
    generator = torch.Generator().manual_seed(4)
    arguments = (method, case.model, case.loss_fn, case.batch)
    first, second = (flat(hesscale.estimate(*arguments, generator=generator)) for _ in range(2))
    assert torch.equal(first, draw(method, case, 1, seed=4))
    assert not torch.equal(first, second)
    assert not torch.equal(flat(hesscale.estimate(*arguments)), flat(hesscale.estimate(*arguments)))


@pytest.mark.parametrize("method", ["ggn_mc", "kfac"])
def test_sampling_without_a_likelihood_is_an_error(method: str) -> None:
    case = BY_NAME["mlp-mse"]
    with pytest.raises(ValueError, match=r"no likelihood.*ends in AbsBackward0.*LogSoftmaxBackward0"):
        hesscale.estimate(method, case.model, lambda y, t: (y - t).abs().mean(), case.batch)
    with pytest.raises(ValueError, match=r"no likelihood.*ends in AddmmBackward0"):
        hesscale.estimate(method, case.model, F.nll_loss, BY_NAME["mlp"].batch)


def chi_square(y: Tensor, t: Tensor) -> Tensor:
    return ((y.exp() - t) ** 2 / y.exp()).mean()


def chi_square_and_other_logarithms(y: Tensor, t: Tensor) -> Tensor:
    return (((variance := y.exp()) - t) ** 2 / variance).mean() + (2 * y.exp()).log().mean()


def unevenly_weighed(y: Tensor, t: Tensor) -> Tensor:
    return (((y - t) ** 2 / (variance := y.exp())) + 2 * variance.log()).mean()


NO_LIKELIHOODS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "chi-square": (chi_square, "ends in DivBackward0"),
    "chi-square and other logarithms": (chi_square_and_other_logarithms, "ends in (Div|Log)Backward0"),
    "a normal with too much of its logarithm": (unevenly_weighed, "log v and d²/v of a normal do not weigh the same"),
    "a square": (lambda y, t: F.cross_entropy(y, t.softmax(1)) ** 2, "ends in PowBackward0 of a scalar"),
    "a squared error": (
        lambda y, t: F.mse_loss(F.mse_loss(y, t), torch.zeros(()).double()),
        "ends in MseLossBackward0 of a scalar",
    ),
    "a logarithm": (lambda y, t: F.mse_loss(y, t).log(), "ends in LogBackward0 of a scalar"),
    "an exponential": (lambda y, t: 2 * F.cross_entropy(y, t.softmax(1)).exp(), "ends in ExpBackward0 of a scalar"),
    "an exponential of a normal": (
        lambda y, t: F.gaussian_nll_loss(y, t, y.exp()).exp(),
        "ends in ExpBackward0 of a scalar",
    ),
    "a root": (lambda y, t: F.mse_loss(y, t).sqrt(), "ends in SqrtBackward0 of a scalar"),
    "a product": (lambda y, t: F.mse_loss(y, t) * F.huber_loss(y, t), "ends in MulBackward0 of a scalar"),
    "a ratio": (lambda y, t: F.mse_loss(y, t) / F.huber_loss(y, t), "ends in DivBackward0 of a scalar"),
}


@pytest.mark.parametrize("method", ["ggn_mc", "kfac"])
@pytest.mark.parametrize("name", NO_LIKELIHOODS)
def test_what_only_looks_like_a_likelihood_is_an_error(name: str, method: str) -> None:
    loss_fn, message = NO_LIKELIHOODS[name]
    case = BY_NAME["mlp-mse"]
    with pytest.raises(ValueError, match=f"no likelihood to draw from: .*{message}"):
        hesscale.estimate(method, case.model, loss_fn, case.batch)


PENALTIES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # and second derivatives
    "square": (lambda p: 0.1 * p.square().sum(), lambda p: torch.full_like(p, 0.2)),
    "power": (lambda p: (p**4).mean() / 2, lambda p: 6 * p.square() / p.numel()),
    "absolute": (lambda p: p.abs().sum() - 1, torch.zeros_like),
    "norm": (lambda p: 2 * p.norm(), lambda p: 2 / p.norm() - 2 * p.square() / p.norm() ** 3),
}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("method", ["ggn_mc", "kfac"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_on_parameters_adds_its_own_diagonal(name: str, method: str, samples: int) -> None:
    penalty, second = PENALTIES[name]
    case = BY_NAME["mlp"]
    params = dict(case.model.named_parameters())

    def penalized(y: Tensor, t: Tensor) -> Tensor:
        return case.loss_fn(y, t) + torch.stack([*map(penalty, params.values())]).sum()

    expected = draw(method, case, samples, seed=4) + flat({key: second(p.detach()) for key, p in params.items()})
    found = draw(method, replace(case, loss_fn=penalized), samples, seed=4)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["ggn_mc", "kfac"])
def test_a_penalty_that_is_no_function_of_each_parameter_is_an_error(method: str) -> None:
    case = BY_NAME["mlp"]
    weight = next(case.model.parameters())
    losses = (
        lambda y, t: case.loss_fn(y, t) + (weight * weight).sum(),
        lambda y, t: case.loss_fn(y, t) + weight.square().sum().sqrt(),
    )
    for loss_fn in losses:
        with pytest.raises(ValueError, match=r"ends in (Mul|Sqrt)Backward0.*A penalty beside one has to be"):
            hesscale.estimate(method, case.model, loss_fn, case.batch)


EMPTY: dict[str, tuple[nn.Module, tuple[int, ...], Callable[..., Tensor], tuple[int, ...]]] = {
    "layers": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,), F.mse_loss, (2,)),
    "classes": (nn.Linear(3, 2), (3,), lambda y, t: -(t * y.log_softmax(1)).sum(), (2,)),
    "places": (nn.Conv2d(1, 2, 3), (1, 5, 5), lambda y, t: -(t * y.log_softmax(1)).mean(), (2, 3, 3)),
    "coins": (nn.Linear(3, 1), (3,), F.binary_cross_entropy_with_logits, (1,)),
}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("method", ESTIMATORS)
@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_has_no_curvature(name: str, method: str, samples: int) -> None:
    model, inputs, loss_fn, targets = EMPTY[name]
    batch = torch.zeros(0, *inputs), torch.zeros(0, *targets)
    found = hesscale.estimate(method, model, loss_fn, batch, samples=samples)
    assert all(not s.any() for s in found.values())


WEIGHT = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
WEIGHED: dict[str, Callable[..., Tensor]] = {
    "by a parameter": lambda y, t: F.mse_loss(y, t) * (-WEIGHT).exp() + WEIGHT,
    "over a parameter": lambda y, t: F.mse_loss(y, t) / WEIGHT.exp(),
    "in pieces": lambda y, t: (F.mse_loss(y, t) - 0.1).abs() + 0.1,
}


@pytest.mark.parametrize("name", WEIGHED)
def test_scalars_may_weigh_a_likelihood(name: str) -> None:
    """Learned weights of tasks, and a loss that is kept above a floor."""
    case = Case("", mlp().double(), WEIGHED[name], (numbers(5, 3), VALUES))
    assert relative(draw("ggn_mc", case, 20000), reference.ggn(case).diagonal()) < 0.025


def test_a_prediction_without_dimensions() -> None:
    """One example, squeezed: a squared error, and a normal with its variance."""
    x, t = numbers(1, 3), torch.tensor(0.4, dtype=torch.float64)
    single = Case("", nn.Linear(3, 1).double(), lambda y, t: (y.squeeze() - t) ** 2, (x, t))
    assert relative(draw("ggn_mc", single, 20000), reference.ggn(single).diagonal()) < 0.025
    model = nn.Linear(3, 2).double()
    normal = Case("", model, lambda y, t: F.gaussian_nll_loss(y[0, 0], t, y[0, 1].exp()), (x, t))
    v = float(model(x)[0, 1].detach().exp())
    expected = torch.stack(
        [x[0].square() / v, x[0].square() / 2]
    ).flatten()  # 1/v, and v² / 2v² through the exponential
    assert relative(draw("ggn_mc", normal, 40000)[:6], expected) < 0.03


def test_a_loss_may_be_a_sum_of_likelihoods() -> None:
    """Also of several on the same outputs, and of squares that were written by hand."""

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(y, t) + F.cross_entropy(y, LABELS) + ((y + t) ** 2).mean()

    case = Case("", mlp().double(), loss_fn, (numbers(5, 3), VALUES))
    assert relative(draw("ggn_mc", case, 20000), reference.ggn(case).diagonal()) < 0.025


def test_one_sample_of_a_fused_attention_takes_one_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that cannot be differentiated twice are no reason to take them apart, which would mix examples."""
    pulls = 0
    original = sampled.pulled_squares

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal pulls
        pulls += 1
        return original(*arguments, **options)

    monkeypatch.setattr(sampled, "pulled_squares", counted)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3))
    found = hesscale.estimate("ggn_mc", model, F.cross_entropy, (torch.randn(6, 5, 8), torch.arange(6) % 3))
    assert pulls == 1
    assert all(bool((s >= 0).all()) for s in found.values())
