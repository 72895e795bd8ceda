"""Training of a compiled model is the eager training: optimizers, schedules and scalers see no difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hesscale
from hesscale.compiled.pieces import Pieces
from hesscale.compiled.region import Region
from hesscale.double_backward import unfused

from .networks import Tied, assert_same, close, compiled, cross_entropy, small, vectors, words

Loss = Callable[..., Tensor]


def by_backward(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    optimizer.backward(loss())


def attached(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    optimizer.attach(loss()).backward()


def armed(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    with optimizer.armed():
        loss().backward()


def train(model: nn.Module, run: Any, flow: Any = by_backward, *, batch: Any = words, **options: Any) -> None:
    """50 steps of two micro-batches each, with a schedule, and a smaller batch at the end of each epoch."""
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-2, every=2, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    for step in range(50):
        for micro in range(2):
            x, y = batch(3 if step % 10 == 9 else 6, 2 * step + micro)
            flow(optimizer, lambda x=x, y=y: run(x, y))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@pytest.mark.parametrize("flow", [by_backward, attached, armed])
def test_training_is_the_eager_one(flow: Any) -> None:
    torch.manual_seed(0)
    ours = Tied().double()
    theirs = copy.deepcopy(ours)
    model = compiled(ours)
    train(ours, lambda x, y: cross_entropy(model, x, y), flow)
    with unfused(theirs):
        train(theirs, lambda x, y: cross_entropy(theirs, x, y), flow)
    assert_same(ours, theirs, close(1e-8))


def batches(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = vectors(count)
    return x + seed, y


def test_columns_where_the_whole_loss_is_compiled() -> None:
    ours, theirs = small(), small()
    step = compiled(lambda x, y: cross_entropy(ours, x, y), dynamic=False)
    train(ours, step, batch=batches, rank=1)
    train(theirs, lambda x, y: cross_entropy(theirs, x, y), batch=batches, rank=1)
    assert_same(ours, theirs, close(1e-8))


def test_a_scaler_that_skips_a_step() -> None:
    found = []
    for is_compiled in (False, True):
        model = small(torch.float32)
        run = compiled(model) if is_compiled else model
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(6):
            x, y = vectors(6, torch.float32)
            if step == 3:
                x = x * torch.inf
            optimizer.backward(scaler.scale(cross_entropy(run, x, y)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((scaler.get_scale(), model))
    (scale, theirs), (our_scale, ours) = found
    assert our_scale == scale
    assert_same(ours, theirs, close(1e-5))


def test_steps_without_curvature_run_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each region a plain and a curvature backward are compiled, each when it is first due."""
    asked, built = [], []
    run, build = Region._run, Pieces.backward
    monkeypatch.setattr(Region, "_run", lambda *args: [asked.append(args[1].inner is not None), run(*args)][1])
    monkeypatch.setattr(Pieces, "backward", lambda *args: [built.append(args[1].inner is not None), build(*args)][1])
    model = small()
    ours, optimizer = compiled(model), hesscale.AdaHesScale(model.parameters(), every=3)
    due = []
    for _ in range(7):
        due.append(optimizer.curvature_due)
        optimizer.zero_grad()
        optimizer.backward(cross_entropy(ours, *vectors(6)))
        optimizer.step()
    assert asked == due
    assert set(due) == {True, False}
    assert built == [True, False]
