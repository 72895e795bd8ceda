"""``rank=`` in compiled passes: columns are pulled by operations as well, and traced with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.compiled.backend import without_mkldnn

from ..columns.networks import LABELS, made
from ..columns.networks import LOSSES as EAGER_LOSSES
from .networks import assert_same, cross_entropy, small, vectors

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

SIGNS = torch.tensor([1.0, -2.0, 0.0, 0.5, -1.0, 1.0], dtype=torch.float64)

TARGETS = torch.arange(24, dtype=torch.float64).reshape(6, 4).sin()
LOSSES = {
    "cross-entropy": EAGER_LOSSES["cross-entropy"],
    "ignored": EAGER_LOSSES["ignored"],
    "binary": lambda y: F.binary_cross_entropy_with_logits(y, (TARGETS[: len(y)] > 0).double()),
    "two terms": lambda y: F.cross_entropy(y[:, :2], LABELS % 2) + F.mse_loss(y[:, 2:], TARGETS[: len(y), 2:]),
}

CASES: dict[str, tuple[str, str, int | str]] = {
    "eigenpairs": ("mlp", "cross-entropy", 2),
    "some ignored": ("mlp", "ignored", 1),
    "axes": ("mlp", "binary", 1),
    "two terms": ("mlp", "two terms", 1),
    "convolution": ("cnn", "cross-entropy", "full"),
    "attention and norms": ("transformer", "cross-entropy", "full"),
    "an embedding used twice": ("tied", "cross-entropy", 1),
    "steps of an LSTM": ("lstm", "cross-entropy", "full"),
    "examples that meet": ("batch norm", "cross-entropy", "full"),
}


@pytest.mark.parametrize(("name", "loss", "rank"), CASES.values(), ids=CASES)
def test_traced_is_eager_bit_by_bit(name: str, loss: str, rank: Any) -> None:
    ours, x = made(name)
    theirs = copy.deepcopy(ours)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return LOSSES[loss](model(x))

    step = hesscale.compile(loss_fn, ours, rank=rank, backend="eager")
    for _ in range(2):
        torch.manual_seed(3)  # of random signs
        step(x)
        torch.manual_seed(3)
        with without_mkldnn():
            hesscale.backward(loss_fn(theirs, x), rank=rank)
        assert_same(ours, theirs)
    assert step.compilations == 1


def test_weights_of_both_signs_and_then_of_one() -> None:
    """Nobody can look at signs while tracing: one graph serves all of them."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return (F.cross_entropy(model(x), y, reduction="none") * weights).sum()

    ours, theirs = small(), small()
    step = hesscale.compile(loss_fn, ours, rank=1, backend="eager")
    for weights in (SIGNS, SIGNS.abs(), -SIGNS.abs()):
        step(*vectors(6), weights)
        hesscale.backward(loss_fn(theirs, *vectors(6), weights), rank=1)
        assert_same(ours, theirs)
    assert step.compilations == 1


def test_an_optimizer_with_rank() -> None:
    ours, theirs = small(), small()
    optimizers = [hesscale.AdaHesScaleGN(m.parameters(), lr=1e-2, rank=1, every=2) for m in (ours, theirs)]
    step = optimizers[0].compile(cross_entropy, ours, backend="eager")
    for _ in range(5):
        step(*vectors(6))
        optimizers[1].backward(cross_entropy(theirs, *vectors(6)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours, theirs)
    assert step.compilations == 2


def test_no_rank() -> None:
    with pytest.raises(ValueError, match="rank must be"):
        hesscale.compile(cross_entropy, small(), rank=-1)
    with pytest.raises(ValueError, match="softmax has no columns"):
        hesscale.compile(cross_entropy, small(), method="bl89", rank=1, backend="eager")(*vectors(5))
