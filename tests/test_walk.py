"""The walk: what it adds up, when it writes, and that a pass which fails leaves everything as it was."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.rules import registered
from hesscale.rules.families import Coupled

from .tensors import assert_close, bowl, leaf, random


def by_hand(weights: list[Tensor], x: Tensor, targets: Tensor) -> list[Tensor]:
    """The recursion of Elsayed & Mahmood (eqs. 5 and 6) for a tanh network, batch and sum, without a graph.

    With a = Wh and h = tanh(a) of each layer:  ∂²L/∂W² ≈ s hᵀ²,  s' = (W²)ᵀs,  s = s'h'² + g'h''.
    """
    inputs, outputs = [x], []
    for weight in weights:
        outputs.append(inputs[-1] @ weight.mT)
        inputs.append(torch.tanh(outputs[-1]))
    q = torch.softmax(outputs[-1], -1)
    g, s = q - F.one_hot(targets, q.shape[-1]), q - q * q
    found = []
    for weight, h in zip(reversed(weights), reversed(inputs[:-1]), strict=True):
        found.append(s.mT @ h.square())
        g, s = g @ weight, s @ weight.square()
        slope = 1 - h.square()
        s, g = slope.square() * s - 2 * h * slope * g, slope * g
    return found[::-1]


@pytest.mark.parametrize("widths", [(3, 4), (5, 7, 2), (2, 3, 4, 5, 6)])
def test_the_recursion_of_the_paper(widths: tuple[int, ...]) -> None:
    weights = [leaf(n, m, seed=n) for m, n in pairwise(widths)]
    x, targets = random(6, widths[0]), torch.arange(6) % widths[-1]
    y = x
    for weight in weights[:-1]:
        y = torch.tanh(y @ weight.mT)
    hesscale.backward(F.cross_entropy(y @ weights[-1].mT, targets, reduction="sum"))
    for weight, expected in zip(weights, by_hand([w.detach() for w in weights], x, targets), strict=True):
        assert_close(weight.curvature, expected)


def failing(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    raise ArithmeticError("in the middle")


@pytest.mark.parametrize("accumulating", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_a_rule_that_fails_changes_nothing(accumulating: bool, attached: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = random(5, 3)
    if accumulating:
        hesscale.backward(model(x).square().mean())
    parameters = list(model.parameters())
    before = [(p.grad, getattr(p, "curvature", None)) for p in parameters]
    values = [(None, None) if g is None else (g.clone(), s.clone()) for g, s in before]
    with registered(Coupled(failing), "TanhBackward0"), pytest.raises(ArithmeticError, match="in the middle"):
        loss = model(x).square().mean()
        hesscale.attach(loss).backward() if attached else hesscale.backward(loss)
    for p, (grad, curvature), (g, s) in zip(parameters, before, values, strict=True):
        assert p.grad is grad and getattr(p, "curvature", None) is curvature
        assert grad is None or (torch.equal(grad, g) and torch.equal(curvature, s))


def test_several_consumers_are_added() -> None:
    x = leaf(3)
    y = torch.exp(x)
    assert_close(hesscale.diagonal(y.sum() + (2 * y).sum(), y), (torch.zeros_like(x),))
    (found,) = hesscale.diagonal(bowl(y.expand(2, 3)) + y.square().sum(), y, retain_graph=True)
    (one,) = hesscale.diagonal(bowl(y.expand(2, 3)), y, retain_graph=True)
    assert_close(found, one + 2)


def test_a_hook_may_clear_gradients_in_the_middle() -> None:
    """As optimizers do that step in backward: what is written afterwards belongs to a new gradient."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = random(5, 3)
    hesscale.backward(model(x).square().mean())
    once = model[0].weight.curvature.clone()
    handle = model[2].weight.register_post_accumulate_grad_hook(lambda p: model.zero_grad())
    hesscale.backward(model(x).square().mean())
    handle.remove()
    assert_close(model[0].weight.curvature, once)


def test_a_sparse_gradient_that_becomes_dense_is_added_to() -> None:
    table = nn.Embedding(4, 3, sparse=True).double()
    picked = torch.tensor([0, 2])

    def losses() -> list[Tensor]:
        return [table(picked).square().sum(), (table.weight**3).sum()]

    expected = sum(hesscale.diagonal(loss, table.weight)[0] for loss in losses())  # type: ignore[misc]
    for loss in losses():
        hesscale.backward(loss)
    assert_close(table.weight.curvature, expected)
