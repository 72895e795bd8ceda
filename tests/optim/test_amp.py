"""GradScaler: curvature loses the factor on the loss as gradients do, and a step with an overflow is skipped whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import hesscale
from hesscale.optim import CurvatureScaled

from .small import PRESETS, assert_close, assert_same, backward, loss_of, network, parameters, train

SCALE = 1000.0  # not a power of two, so that a factor left somewhere shows


def scaler(**options: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=SCALE, growth_interval=2, growth_factor=3.0, **options)


def scaled_training(preset: type[CurvatureScaled], flow: str, **options: Any) -> list[Tensor]:
    model, scale = network(), scaler()
    optimizer = preset(model.parameters(), **options)
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if flow.startswith("attach"):
            scale.scale(hesscale.attach(loss)).backward()
        else:
            backward(optimizer, scale.scale(loss), step)
        if flow.endswith("scaler.unscale_"):
            scale.unscale_(optimizer)
        if flow.endswith("optimizer.unscale_"):
            optimizer.unscale_(scale)
        if "unscale_" in flow:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scale.step(optimizer)
        scale.update()
    return parameters(model)


def plain_training(preset: type[CurvatureScaled], *, clip: bool, **options: Any) -> list[Tensor]:
    model = network()
    train(
        model,
        preset(model.parameters(), **options),
        before_step=lambda: clip and nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )
    return parameters(model)


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"foreach": True, "eps": 0.1}], ids=str)
@pytest.mark.parametrize("flow", ["backward", "backward, scaler.unscale_", "backward, optimizer.unscale_"])
@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_training_is_that_without_a_scaler(preset: type[CurvatureScaled], flow: str, options: dict[str, Any]) -> None:
    expected = plain_training(preset, clip="unscale_" in flow, **options)
    assert_close(scaled_training(preset, flow, **options), expected, 1e-6)  # the scaler's factors are float32


@pytest.mark.parametrize("flow", ["attach", "attach, optimizer.unscale_", "attach, scaler.unscale_"])
def test_attached_losses_too(flow: str) -> None:
    expected = plain_training(hesscale.AdaHesScale, clip="unscale_" in flow)
    assert_close(scaled_training(hesscale.AdaHesScale, flow), expected, 1e-6)


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], list[Tensor]]] = {
    "a factor after the scaler's": lambda scale, a, b: [scale(a) * torch.tensor(0.5)],
    "a factor before the scaler's": lambda scale, a, b: [scale(torch.tensor(0.5) * a)],
    "a float32 factor of the loss alone": lambda scale, a, b: [scale(a * torch.tensor(SCALE))],
    "divided": lambda scale, a, b: [scale(a) / 3],
    "two losses": lambda scale, a, b: [scale(a) + scale(b) * torch.tensor(2.0)],
    "a list of losses": lambda scale, a, b: [sum(scale([a, b]))],
    "accumulated": lambda scale, a, b: [scale(a) / 2, scale(b) * torch.tensor(0.5)],
}


@pytest.mark.parametrize("unscale", [None, "scaler", "optimizer"])
@pytest.mark.parametrize("name", LOSSES)
def test_whatever_else_is_multiplied_the_scale_is_the_scaler_s(name: str, unscale: str | None) -> None:
    found = []
    for scale in (scaler(), GradScaler("cpu", enabled=False)):
        model = network()
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            a, b = loss_of(model, 2 * step), loss_of(model, 2 * step + 1)
            for loss in LOSSES[name](scale.scale, a, b):
                optimizer.backward(loss)
            if unscale is not None:
                scale.unscale_(optimizer) if unscale == "scaler" else optimizer.unscale_(scale)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scale.step(optimizer)
            scale.update()
        found.append(parameters(model))
    assert_close(*found, 1e-6)


def test_a_scaler_of_another_kind_must_say_its_factor() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters())
    optimizer.backward(loss_of(model))
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros(())
    with pytest.raises(RuntimeError, match=r"optimizer\.unscale_\(scaler\) before the step"):
        optimizer.step()
    assert_same(parameters(model), parameters(network()))


def test_only_a_scaler_is_told_that_the_step_unscales() -> None:
    """Lightning refuses to clip the gradients of optimizers that say so, with and without a scaler."""

    def handles_unscaling(optimizer: Any) -> bool:
        return getattr(optimizer, "_step_supports_amp_scaling", False)

    class Plugin:
        def asks(self, optimizer: Any) -> bool:
            return getattr(optimizer, "_step_supports_amp_scaling", False)

    optimizer = hesscale.AdaHesScale(network().parameters())
    assert not handles_unscaling(optimizer)
    assert not Plugin().asks(optimizer)


def test_gradients_in_float16_are_unscaled_without_loss() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer, scale = hesscale.AdaHesScale([p], lr=0.01), scaler()
    loss = scale.scale((1e-6 * p.float().square()).sum())  # 2e-6 in float16 has few digits
    optimizer.backward(loss)
    scale.step(optimizer)
    torch.testing.assert_close(p.detach(), torch.full_like(p, 0.99).detach(), rtol=0, atol=1e-3)
    torch.testing.assert_close(p.grad, torch.full_like(p, 2e-6).detach(), rtol=0, atol=1e-7)


def test_curvature_is_unscaled_to_what_it_would_have_been() -> None:
    model, other = network(), network()
    optimizer = hesscale.AdaHesScale(model.parameters())
    scale = scaler()
    optimizer.backward(scale.scale(loss_of(model)))
    optimizer.unscale_(scale)
    hesscale.backward(loss_of(other))
    assert_close([p.curvature for p in model.parameters()], [p.curvature for p in other.parameters()], 1e-6)
    assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()], 1e-6)


def test_step_leaves_unscaled_gradients_as_other_optimizers_do() -> None:
    model, scale = network(), scaler()
    optimizer = hesscale.AdaHesScale(model.parameters())
    optimizer.backward(scale.scale(loss_of(model)))
    before = [p.grad.clone() for p in model.parameters()]
    scale.step(optimizer)
    assert_close([p.grad for p in model.parameters()], [g / SCALE for g in before], 1e-6)


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_skips_the_whole_step(unscale: bool) -> None:
    model, scale = network(), scaler()
    optimizer = hesscale.AdaHesScale(model.parameters(), weight_decay=0.1, every=2)
    optimizer.backward(scale.scale(loss_of(model)))
    model[0].weight.grad[0, 0] = torch.inf
    if unscale:
        scale.unscale_(optimizer)
    scale.step(optimizer)
    scale.update()
    assert scale.get_scale() == SCALE / 2
    assert_same(parameters(model), parameters(network()))
    assert optimizer.curvature_due
    assert all(p.curvature is None for p in model.parameters())
    assert optimizer.param_groups[0]["steps"] == 0


def test_an_overflow_of_curvature_alone_skips_the_step_too() -> None:
    model, scale = network(), scaler()
    optimizer = hesscale.AdaHesScale(model.parameters())
    optimizer.backward(scale.scale(loss_of(model)))
    model[0].weight.curvature[0, 0] = torch.inf
    with pytest.warns(UserWarning, match=r"curvature of .* is not finite, under the loss scale"):
        scale.step(optimizer)
    assert_same(parameters(model), parameters(network()))


def test_a_disabled_scaler_is_none() -> None:
    model, other = network(), network()
    optimizer = hesscale.AdaHesScale(model.parameters())
    off = GradScaler("cpu", enabled=False)
    optimizer.backward(off.scale(loss_of(model)))
    optimizer.unscale_(off)
    off.step(optimizer)
    train(other, hesscale.AdaHesScale(other.parameters()), [0])
    assert_same(parameters(model), parameters(other))


def test_autocast() -> None:
    model = network().float()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(lambda x: model(x.float()))
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())
