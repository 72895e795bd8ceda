"""Activations and losses of torch.nn as their users meet them, composed ones too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.testing import check_rule, exact_diagonal

from .rules.case import between, constant, randn

x, t = randn(3, 4), randn(3, 4, seed=1)
maps = randn(2, 3, 2, 2)
classes, pixels = torch.tensor([1, 3, 1]), torch.tensor([[[0, 1], [2, 2]], [[1, 0], [2, 1]]])
weight, soft = constant(between(0.3, 2.0, 4)), constant(t).softmax(1)
signs = constant(t).sign()

ACTIVATIONS = [
    *(nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(), nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU()),
    *(nn.Mish(), nn.Softplus(), nn.Sigmoid(), nn.Tanh(), nn.LogSigmoid(), nn.Hardtanh(), nn.Hardswish()),
    *(nn.Hardshrink(), nn.Softshrink(), nn.Tanhshrink(), nn.Softsign(), nn.PReLU(4), nn.RReLU(), nn.Threshold(0.1, 2)),
    *(nn.GLU(), nn.Softmin(1), nn.Softmax(1), nn.LogSoftmax(0), nn.Identity(), nn.Dropout(), nn.AlphaDropout()),
    *(nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.SiLU(inplace=True), nn.Dropout(inplace=True)),
]


@pytest.mark.parametrize("module", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_activation(module: nn.Module, training: bool) -> None:
    def call(z: Tensor) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return module(z + 0)

    module.double().train(training)
    check_rule(call, x)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_channel_dropout(dims: int) -> None:
    inputs = randn(2, 3, *[2] * dims)

    def call(z: Tensor) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return getattr(F, f"dropout{dims}d")(z)

    check_rule(call, inputs)


def batchmean(reduction: str) -> str:
    """What torch recommends for this loss in place of the mean."""
    return {"mean": "batchmean"}.get(reduction, reduction)


EXACT_LOSSES = {
    "cross_entropy": lambda r: F.cross_entropy(x, classes, reduction=r),
    "cross_entropy-weight": lambda r: F.cross_entropy(x, classes, weight, reduction=r),
    "cross_entropy-smoothing": lambda r: F.cross_entropy(x, classes, weight, label_smoothing=0.2, reduction=r),
    "cross_entropy-ignore": lambda r: F.cross_entropy(x, classes, ignore_index=1, label_smoothing=0.1, reduction=r),
    "cross_entropy-soft": lambda r: F.cross_entropy(x, soft, weight, label_smoothing=0.1, reduction=r),
    "cross_entropy-maps": lambda r: F.cross_entropy(maps, pixels, reduction=r),
    "cross_entropy-single": lambda r: F.cross_entropy(x[0], classes[0], reduction=r),
    "nll-log_softmax": lambda r: F.nll_loss(x.log_softmax(1), classes, weight, reduction=r),
    "mse": lambda r: F.mse_loss(x, constant(t), reduction=r),
    "l1": lambda r: F.l1_loss(x, constant(t), reduction=r),
    "smooth_l1": lambda r: F.smooth_l1_loss(x, constant(t), reduction=r),
    "huber": lambda r: F.huber_loss(x, constant(t), reduction=r),
    "bce": lambda r: F.binary_cross_entropy(x.sigmoid().detach().requires_grad_(), soft, reduction=r),
    "bce_with_logits": lambda r: F.binary_cross_entropy_with_logits(x, soft, pos_weight=weight, reduction=r),
    "kl": lambda r: F.kl_div(x, soft, reduction=batchmean(r)),
    "kl-log_target": lambda r: F.kl_div(x, soft.log(), log_target=True, reduction=batchmean(r)),
    "kl-log_softmax": lambda r: F.kl_div(x.log_softmax(1), soft, reduction=batchmean(r)),
    "poisson": lambda r: F.poisson_nll_loss(x, soft, reduction=r),
    "gaussian": lambda r: F.gaussian_nll_loss(x, constant(t), constant(t).square() + 0.3, full=True, reduction=r),
    "hinge_embedding": lambda r: F.hinge_embedding_loss(x, signs, reduction=r),
    "margin_ranking": lambda r: F.margin_ranking_loss(x, constant(t), signs, reduction=r),
    "soft_margin": lambda r: F.soft_margin_loss(x, signs, reduction=r),
    "multilabel_soft_margin": lambda r: F.multilabel_soft_margin_loss(x, (soft > 0.2).double(), reduction=r),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", EXACT_LOSSES)
def test_loss_is_exact_at_the_output(name: str, reduction: str) -> None:
    """At the network's output the diagonal is exact; "none" is averaged by hand, as users do."""
    loss = EXACT_LOSSES[name](reduction)
    loss = loss if reduction != "none" else (loss * torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape)).mean()
    leaf = maps if "maps" in name else next(iter(leaves_of(loss)))
    (expected,) = exact_diagonal(loss, leaf)
    (found,) = hesscale.diagonal(loss, leaf)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def leaves_of(loss: Tensor) -> set[Tensor]:
    stack, leaves = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and hasattr(node, "variable"):
            leaves.add(node.variable)
        elif node is not None:
            stack.extend(child for child, _ in node.next_functions)
    return leaves


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("log_input", [True, False])
def test_poisson_variants_are_exact(full: bool, log_input: bool) -> None:
    rate = between(0.3, 2.0, 3, 4)
    loss = F.poisson_nll_loss(rate, soft * 3, log_input=log_input, full=full)
    expected = exact_diagonal(loss, rate)
    torch.testing.assert_close(hesscale.diagonal(loss, rate), expected, rtol=1e-10, atol=1e-10)


def test_gaussian_is_exact_in_mean_and_variance() -> None:
    variance = between(0.3, 2.0, 3, 4)
    loss = F.gaussian_nll_loss(x, constant(t), variance)
    found, expected = hesscale.diagonal(loss, (x, variance), retain_graph=True), exact_diagonal(loss, (x, variance))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


COMPOSED_LOSSES = {
    "cosine_embedding": lambda: F.cosine_embedding_loss(x, t, torch.ones(3)),
    "triplet": lambda: F.triplet_margin_loss(x, t, x.flip(0)),
    "triplet_with_distance": lambda: F.triplet_margin_with_distance_loss(x, t, x.flip(0)),
    "multi_margin": lambda: F.multi_margin_loss(x, classes, p=2),
    "multilabel_margin": lambda: F.multilabel_margin_loss(x, torch.tensor([[0, 2, -1, 1]] * 3)),
}


@pytest.mark.parametrize("name", COMPOSED_LOSSES)
def test_other_losses_run(name: str) -> None:
    """Losses that couple several inputs: approximated where paths meet, finite always."""
    (found,) = hesscale.diagonal(COMPOSED_LOSSES[name](), x)
    assert found is not None
    assert torch.isfinite(found).all()


def test_adaptive_softmax_runs() -> None:
    torch.manual_seed(0)
    head = nn.AdaptiveLogSoftmaxWithLoss(4, 10, [4, 7], div_value=1.5).double()
    hesscale.backward(head(randn(6, 4), torch.tensor([0, 3, 5, 9, 1, 8])).loss)
    assert all(torch.isfinite(p.curvature).all() for p in head.parameters() if p.grad is not None)  # type: ignore[attr-defined]
