"""Draws of the Gauss-Newton diagonal: one per example, right on average, and as BackPACK has them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale

from .test_squares import N, assert_same, cross_entropy, made, ours


def cross_entropy_draw(y: Tensor, generator: torch.Generator) -> Tensor:
    q = y.softmax(1)
    drawn = torch.multinomial(q, 1, generator=generator)[:, 0]
    return (q - F.one_hot(drawn, q.shape[1])) / math.sqrt(len(y))


def test_classes_are_drawn_once_per_example() -> None:
    model, x = made("mlp")
    y = model(x)
    draw = cross_entropy_draw(y, torch.Generator().manual_seed(5)).detach()
    expected = {}
    for name, p in model.named_parameters():
        rows = [torch.autograd.grad(y[n], p, draw[n], retain_graph=True)[0] for n in range(N)]
        expected[name] = torch.stack(rows).square().sum(0)
    assert_same(ours(model, x, cross_entropy), expected)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_expectation_is_the_exact_diagonal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be drawn, each weighted by its probability."""
    model, x = made(name)
    q = model(x).softmax(1).detach()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for classes in itertools.product(range(2), repeat=N):
        drawn = torch.tensor(classes).unsqueeze(1)
        monkeypatch.setattr(torch, "multinomial", lambda *_, drawn=drawn, **__: drawn)
        for name, curvature in ours(model, x, cross_entropy).items():
            total[name] += q.gather(1, drawn).prod() * curvature
    exact = hesscale.estimate("ggn", model, nn.CrossEntropyLoss(), (x, torch.arange(N) % 2))
    assert_same(total, {name: exact[name] for name in total})


def draws_of(model: nn.Module, x: Tensor, count: int) -> Tensor:
    optimizer = hesscale.AdaGGNMC(model.parameters())
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        optimizer.zero_grad()
        optimizer.backward(cross_entropy(model(x)), generator=generator)
        rows.append(torch.cat([p.curvature.flatten() for p in model.parameters()]))
    return torch.stack(rows)


@pytest.mark.filterwarnings("ignore")  # BackPACK hooks modules in a way that torch has announced to end
def test_mean_and_spread_are_those_of_backpack() -> None:
    backpack, extensions = (pytest.importorskip(name) for name in ("backpack", "backpack.extensions"))
    model, x = made("mlp")
    rows = draws_of(model, x, 200)
    extended, loss = backpack.extend(model), backpack.extend(nn.CrossEntropyLoss())
    theirs = []
    torch.manual_seed(0)
    for _ in range(200):
        with backpack.backpack(extensions.DiagGGNMC()):
            loss(extended(x), torch.arange(N) % 2).backward()
        theirs.append(torch.cat([p.diag_ggn_mc.flatten() for p in model.parameters()]))
    others = torch.stack(theirs)
    assert (rows.mean(0) - others.mean(0)).norm() < 0.1 * others.mean(0).norm()
    assert abs(rows.var(0).sum() / others.var(0).sum() - 1) < 0.2  # the square of a batch gradient: several times that
