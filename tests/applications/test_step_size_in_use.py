"""Trust regions in training loops as people write them: schedulers, closures, trainers, loss scales, half precision."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hesscale.applications.step_size import TrustRegion

from .test_step_size import INNER, batch, flat, network, train


def test_training_resumes_bit_for_bit() -> None:
    def optimizer_of(model: nn.Module) -> TrustRegion:
        return TrustRegion(INNER["AdamW"](model.parameters()), 1e-4, every=2)

    whole, half = network(), network()
    train(whole, optimizer_of(whole), steps=8)
    optimizer = optimizer_of(half)
    train(half, optimizer, steps=5)
    saved = copy.deepcopy((half.state_dict(), optimizer.state_dict()))
    resumed = network(seed=1)
    resumed.load_state_dict(saved[0])
    again = optimizer_of(resumed)
    again.load_state_dict(saved[1])
    train(resumed, again, steps=3, first=5)
    assert torch.equal(flat(resumed), flat(whole))
    copied, copy_of = copy.deepcopy((half, optimizer))
    train(copied, copy_of, steps=3, first=5)
    assert torch.equal(flat(copied), flat(whole))
    pickled, pickle_of = pickle.loads(pickle.dumps((half, optimizer)))
    train(pickled, pickle_of, steps=3, first=5)
    assert torch.equal(flat(pickled), flat(whole))


def test_its_checkpoint_is_one_of_the_inner_optimizer_too() -> None:
    model = network()
    optimizer = TrustRegion(INNER["Adam"](model.parameters()), 1e-4)
    train(model, optimizer)
    alone = INNER["Adam"](model.parameters())
    alone.load_state_dict(optimizer.state_dict())
    other = TrustRegion(INNER["Adam"](model.parameters()), 1e-4, every=5)
    other.load_state_dict(alone.state_dict())
    assert other.curvature_due
    train(model, other, steps=1)


def test_schedulers_and_closures_work() -> None:
    model = network()
    optimizer = TrustRegion(INNER["SGD"](model.parameters()), 1e-4)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    x, y = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        optimizer.backward(loss)
        return loss

    for _ in range(2):
        assert optimizer.step(closure).item() > 0
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.inner.param_groups[0]["lr"] == 0.3 / 4


def test_trainers_that_leave_no_line_are_armed() -> None:
    models = [network(), network()]
    optimizers = [TrustRegion(INNER["Adam"](model.parameters()), 1e-4) for model in models]
    train(models[0], optimizers[0])
    with optimizers[1].armed():
        for seed in range(5):
            x, y = batch(seed)
            optimizers[1].zero_grad()
            F.cross_entropy(models[1](x), y).backward()
            optimizers[1].step()
    assert torch.equal(flat(models[0]), flat(models[1]))


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("method", ["hesscale", "squared_gradient"])
def test_loss_scaling_cancels(unscales: bool, method: str) -> None:
    """A scale that is a power of two changes no digit."""
    plain, scaled = network().float(), network().float()
    train_with = [TrustRegion(INNER["Adam"](m.parameters()), 1e-4, method=method) for m in (plain, scaled)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(4):
        x, y = batch(seed)
        for model, optimizer in zip((plain, scaled), train_with, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.float()), y)
            if model is plain:
                optimizer.backward(loss)
                optimizer.step()
                continue
            optimizer.backward(scaler.scale(loss))
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert train_with[0].factor == pytest.approx(train_with[1].factor, rel=1e-6)
    torch.testing.assert_close(flat(plain), flat(scaled))


def test_an_overflow_under_a_loss_scale_skips_the_step() -> None:
    model = network()
    optimizer = TrustRegion(INNER["Adam"](model.parameters()), 1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = flat(model)
    optimizer.backward(scaler.scale(F.cross_entropy(model(batch()[0]) * math.inf, batch()[1]).nan_to_num(math.inf)))
    scaler.step(optimizer)
    assert torch.equal(flat(model), before)
    assert not optimizer.state


def test_half_precision_is_averaged_in_single() -> None:
    model = network().to(torch.bfloat16)
    optimizer = TrustRegion(INNER["SGD"](model.parameters()), 1e-4)
    optimizer.backward(F.cross_entropy(model(batch()[0].bfloat16()).float(), batch()[1]))
    optimizer.step()
    assert 0 < optimizer.factor < 1
    assert {value.dtype for value, _ in optimizer.state_dict()["trust_region"]["averages"].values()} == {torch.float32}


@pytest.mark.parametrize("method", ["squared_gradient", "hesscale"])
def test_a_loss_may_be_attached(method: str) -> None:
    models = [network(), network()]
    optimizers = [TrustRegion(INNER["Adam"](model.parameters()), 1e-4, method=method) for model in models]
    train(models[0], optimizers[0], steps=1)
    with optimizers[1].armed():
        pass
    optimizers[1].attach(F.cross_entropy(models[1](batch()[0]), batch()[1])).backward()
    optimizers[1].step()
    assert torch.equal(flat(models[0]), flat(models[1]))


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "ReduceLROnPlateau", "CosineAnnealingLR", "SWALR"])
def test_schedulers_of_torch_find_what_they_need(scheduler: str) -> None:
    model = network()
    optimizer = TrustRegion(INNER["Adam"](model.parameters()), 1e-4)
    made: dict[str, Callable[[], Any]] = {
        "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4),
        "ReduceLROnPlateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        "CosineAnnealingLR": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        "SWALR": lambda: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01),
    }
    one = made[scheduler]()
    for _ in range(3):
        train(model, optimizer, steps=1)
        one.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
