"""What users of torch.optim expect of any optimizer, asked of every preset."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hesscale
from hesscale.optim import CurvatureScaled

from .small import PRESETS, assert_close, assert_same, backward, loss_of, network, parameters, random, train

Preset = type[CurvatureScaled]


@pytest.fixture(params=PRESETS.values(), ids=PRESETS.keys())
def preset(request: pytest.FixtureRequest) -> Preset:
    found: Preset = request.param
    return found


def trained(preset: Preset, **options: Any) -> list[Tensor]:
    model = network()
    train(model, preset(model.parameters(), **options))
    return parameters(model)


def test_the_loss_falls(preset: Preset) -> None:
    model = network()
    losses = train(model, preset(model.parameters(), lr=0.01), [0] * 30)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("options", [{}, {"every": 2, "weight_decay": 0.1}, {"trust_region": 1e-4}], ids=str)
def test_foreach_equals_the_loop(preset: Preset, options: dict[str, Any]) -> None:
    assert_close(trained(preset, foreach=True, **options), trained(preset, foreach=False, **options), 1e-13)


def test_capturable_equals_the_loop(preset: Preset) -> None:
    assert_close(trained(preset, capturable=True), trained(preset), 1e-12)
    assert_close(trained(preset, capturable=True, foreach=True), trained(preset), 1e-12)


def test_groups_have_their_own_options(preset: Preset) -> None:
    model, first, last = network(), network(), network()
    optimizer = preset([{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}], lr=0.01)
    train(model, optimizer, [0])
    train(first, preset(first.parameters(), lr=0.02), [0])
    train(last, preset(last.parameters(), lr=0.01), [0])
    assert_same(parameters(model[0]), parameters(first[0]))
    assert_same(parameters(model[2]), parameters(last[2]))


def test_a_group_added_later_keeps_pace(preset: Preset) -> None:
    model = network()
    optimizer = preset(model[2].parameters(), every=4)
    train(model, optimizer, range(6))
    optimizer.add_param_group({"params": model[0].parameters()})
    train(model, optimizer, range(6, 9))
    assert [group["steps"] for group in optimizer.param_groups] == [9, 9]
    assert [optimizer.state[layer.weight]["step"].item() for layer in (model[2], model[0])] == [9.0, 1.0]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_tensor_for_lr(preset: Preset, foreach: bool, capturable: bool) -> None:
    options: dict[str, Any] = {"foreach": foreach, "capturable": capturable, "weight_decay": 0.1}
    lr = torch.tensor(0.01, dtype=torch.float64)
    assert_close(trained(preset, lr=lr, **options), trained(preset, lr=0.01, **options), 1e-12)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.9**step),
    "MultiplicativeLR": lambda it: lr_scheduler.MultiplicativeLR(it, lambda step: 0.9),
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2),
    "MultiStepLR": lambda it: lr_scheduler.MultiStepLR(it, [1, 3]),
    "ConstantLR": lambda it: lr_scheduler.ConstantLR(it, 0.5, 2),
    "LinearLR": lambda it: lr_scheduler.LinearLR(it, 0.5, total_iters=3),
    "ExponentialLR": lambda it: lr_scheduler.ExponentialLR(it, 0.9),
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 4),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 2),
    "PolynomialLR": lambda it: lr_scheduler.PolynomialLR(it, 4),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.001, 0.01, step_size_up=2, cycle_momentum=True),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.01, total_steps=6),
    "ReduceLROnPlateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=0),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.ConstantLR(it, 0.1), lr_scheduler.ExponentialLR(it, 0.9)], [2]
    ),
    "ChainedScheduler": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(it, 0.1), lr_scheduler.ExponentialLR(it, 0.9)]
    ),
}


def test_no_scheduler_is_forgotten() -> None:
    base = (lr_scheduler.LRScheduler, lr_scheduler._LRScheduler)
    kinds = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind not in base
    }
    assert kinds == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    """Five steps of a scheduler are five optimizers, each with the lr and betas it had set."""
    model, by_hand = network(), network()
    optimizer, manual = hesscale.AdaHesScale(model.parameters()), hesscale.AdaHesScale(by_hand.parameters())
    scheduler = SCHEDULERS[name](optimizer)
    rates = set()
    for step in range(5):
        group = optimizer.param_groups[0]
        manual.param_groups[0].update(lr=group["lr"], betas=group["betas"])
        rates.add(group["lr"])
        train(model, optimizer, [step])
        train(by_hand, manual, [step])
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(rates) > 1
    assert_same(parameters(model), parameters(by_hand))


def test_parameters_without_gradient_stay(preset: Preset) -> None:
    model = network()
    idle = nn.Parameter(random(3))
    optimizer = preset([idle, *model.parameters()], weight_decay=0.1)
    train(model, optimizer)
    assert torch.equal(idle, random(3))
    assert idle not in optimizer.state


def test_nothing_to_do_is_fine(preset: Preset) -> None:
    model = network()
    optimizer = preset(model.parameters())
    optimizer.step()
    assert_same(parameters(model), parameters(network()))


def saved_and_loaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("carry", [copy.deepcopy, saved_and_loaded], ids=["deepcopy", "file"])
@pytest.mark.parametrize("options", [{}, {"every": 3, "foreach": True}, {"capturable": True}], ids=str)
def test_resuming_continues_bit_for_bit(preset: Preset, options: dict[str, Any], carry: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = preset(model.parameters(), lr=0.02, **options)
    train(model, optimizer, range(4))
    checkpoint = carry({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(4, 8))

    resumed = network()
    resumed.load_state_dict(checkpoint["model"])
    again = preset(resumed.parameters())
    again.load_state_dict(checkpoint["optimizer"])
    train(resumed, again, range(4, 8))
    assert_same(parameters(resumed), parameters(model))


def test_counts_survive_a_checkpoint_of_low_precision() -> None:
    model = nn.Linear(4, 2, dtype=torch.bfloat16)
    optimizer = hesscale.AdaHesScale(model.parameters())
    for step in range(300):
        for p in model.parameters():
            p.grad = p.curvature = torch.full_like(p, 0.5 + step % 2)
        optimizer.step()
    again = hesscale.AdaHesScale(model.parameters())
    again.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    state = again.state[model.weight]
    assert (state["step"].item(), state["refreshes"]) == (300.0, 300)
    assert state["step"].dtype == torch.float32


def test_the_state_is_what_others_expect() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.named_parameters())
    train(model, optimizer, [0])
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for p, state in optimizer.state.items():
        assert isinstance(state["step"], Tensor)
        assert state["step"].shape == ()
        assert state["exp_avg"].shape == state["mean_curvature"].shape == p.shape
        assert not state["exp_avg"].requires_grad


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_copies_go_their_own_way(preset: Preset, carry: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = preset(model.parameters(), every=2)
    train(model, optimizer, range(3))
    other_model, other = carry((model, optimizer))
    train(other_model, other, range(3, 6))
    assert not torch.equal(parameters(other_model)[0], parameters(model)[0])
    train(model, optimizer, range(3, 6))
    assert_same(parameters(other_model), parameters(model))


def test_options_missing_in_an_old_pickle_get_their_defaults() -> None:
    optimizer = hesscale.AdaHesScale(network().parameters())
    state = optimizer.__getstate__()
    del state["param_groups"][0]["scale"]
    old = hesscale.AdaHesScale.__new__(hesscale.AdaHesScale)
    old.__setstate__(state)
    assert old.param_groups[0]["scale"] == "rms"
    assert old.curvature_due


def test_hooks_run(preset: Preset) -> None:
    model = network()
    optimizer = preset(model.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    train(model, optimizer, [0])
    handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert sorted(calls) == ["after", "before", "global", "loaded", "saved"]


def test_a_closure_is_run_and_its_loss_returned(preset: Preset) -> None:
    model = network()
    optimizer = preset(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(optimizer, loss)
        return loss

    with torch.no_grad():  # as some trainers call it
        loss = optimizer.step(closure)
    other = network()
    train(other, preset(other.parameters()), [0])
    assert loss.item() == loss_of(network()).item()
    assert_same(parameters(model), parameters(other))


def test_clipped_gradients_are_used(preset: Preset) -> None:
    model, other = network(), network()
    optimizer = preset(model.parameters(), betas=(0.0, 0.999), bound=None)
    train(model, optimizer, [0], before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    train(other, preset(other.parameters(), betas=(0.0, 0.999), bound=None), [0])
    moved = [
        (a - b, a - c) for a, b, c in zip(parameters(network()), parameters(model), parameters(other), strict=True)
    ]
    factor = 1e-3 / (torch.cat([p.grad.flatten() for p in other.parameters()]).norm() + 1e-6)  # as torch has it
    assert factor < 1
    assert_close([a for a, _ in moved], [b * factor for _, b in moved], 1e-9)


def test_sparse_gradients_are_refused(preset: Preset) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = preset(table.named_parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"weight has a sparse gradient.*sparse=False"):
        optimizer.step()


def test_complex_parameters_are_refused(preset: Preset) -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="complex"):
        preset([p]).step()


def test_channels_last_and_transposed_parameters() -> None:
    for make in (lambda x: x.to(memory_format=torch.channels_last), lambda x: x.transpose(0, 1)):
        found = []
        for foreach in (False, True):
            p = nn.Parameter(make(random(4, 4, 3, 3)))
            p.grad, p.curvature = random(4, 4, 3, 3, seed=1), random(4, 4, 3, 3, seed=2)
            optimizer = hesscale.AdaHesScale([p], foreach=foreach)
            optimizer.step()
            assert optimizer.state[p]["exp_avg"].stride() == p.stride()
            found.append(p.detach())
        assert_close([found[0]], [found[1]], 1e-14)


def test_repr_and_doc(preset: Preset) -> None:
    assert "lr: 0.001" in repr(preset(network().parameters()))
    assert preset.__doc__
    assert preset.backward.__doc__


def test_no_warning_is_left_to_chance() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(hesscale.AdaHesScale)


def test_a_group_that_is_refused_is_not_there() -> None:
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = hesscale.AdaHesScale([p], lr=0.1)
    with pytest.raises(ValueError, match="lr must not be negative"):
        optimizer.add_param_group({"params": [q], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [q], "lr": 0.1})


@pytest.mark.parametrize("scale", ["rms", "mean", "mean_abs"])
@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.3, 0.2), (0.9, 0.0)])
@pytest.mark.parametrize("fused", [True, False])
def test_averages_of_short_memory_do_not_cancel(scale: str, betas: tuple[float, float], fused: bool) -> None:
    """From a large number to one that is below its last digit."""
    p = nn.Parameter(torch.ones(1))
    optimizer = hesscale.optim.CurvatureScaled([p], lr=0.1, betas=betas, scale=scale, fused=fused)
    m = v = torch.zeros(1, dtype=torch.float64)
    for value in (1.0, 1e-9):
        p.grad, p.curvature = torch.full((1,), value), torch.full((1,), value)  # type: ignore[attr-defined]
        optimizer.step()
        m = betas[0] * m + (1 - betas[0]) * value
        power = 2 if scale == "rms" else 1
        v = (betas[1] * v**power + (1 - betas[1]) * value**power) ** (1 / power)
    state = optimizer.state[p]
    torch.testing.assert_close(state["exp_avg"].double(), m, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(state["mean_curvature"].double(), v, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scale", ["rms", "mean", "mean_abs"])
def test_several_steps_can_be_differentiated(scale: str) -> None:
    lr = torch.tensor(0.1, requires_grad=True)
    start = torch.ones(3, requires_grad=True)
    p = start.clone()
    optimizer = hesscale.optim.CurvatureScaled([p], lr=lr, scale=scale, differentiable=True)
    for step in range(3):
        p.grad, p.curvature = torch.arange(1.0, 4.0) + step, torch.arange(2.0, 5.0)  # type: ignore[attr-defined]
        optimizer.step()
    (slope,) = torch.autograd.grad(p.sum(), lr)
    assert slope.isfinite() and slope != 0
