"""How curvature reaches a step: by optimizer.backward, by hand, over micro-batches; and what a step refuses."""

import gc
import math
import runpy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.optim import CurvatureScaled

from ..test_price import Counting
from .small import PRESETS, assert_close, assert_same, backward, loss_of, network, parameters, random, train


def test_by_hand_is_the_same() -> None:
    def by(pass_: Any) -> list[Tensor]:
        model = network()
        optimizer = hesscale.AdaHesScale(model.parameters())
        for batch in range(3):
            optimizer.zero_grad()
            pass_(optimizer, loss_of(model, batch))
            optimizer.step()
        return parameters(model)

    expected = by(lambda optimizer, loss: optimizer.backward(loss))
    assert_same(by(lambda _, loss: hesscale.backward(loss)), expected)
    assert_same(by(lambda _, loss: hesscale.attach(loss).backward()), expected)


def test_the_gauss_newton_preset_takes_an_output() -> None:
    def two_stages(model: nn.Module, optimizer: Any, **options: Any) -> Tensor:
        logits = model(random(6, 5))
        probabilities = logits.softmax(1)
        loss = F.nll_loss(probabilities.log(), torch.tensor([0, 1, 2, 0, 1, 2]))
        optimizer.backward(loss, **({"output": logits} if options else {}))
        found: Tensor = next(model.parameters()).curvature
        return found

    def one_stage(model: nn.Module, optimizer: Any) -> Tensor:
        optimizer.backward(F.cross_entropy(model(random(6, 5)), torch.tensor([0, 1, 2, 0, 1, 2])))
        found: Tensor = next(model.parameters()).curvature
        return found

    models = [network() for _ in range(2)]
    optimizers = [hesscale.AdaHesScaleGN(model.parameters()) for model in models]
    assert two_stages(models[0], optimizers[0], output=True).shape == one_stage(models[1], optimizers[1]).shape


@pytest.mark.parametrize("preset", [hesscale.AdaHesScale, hesscale.AdaHesScaleGN, hesscale.AdaBL89])
@pytest.mark.parametrize("every", [1, 2])
def test_micro_batches_add_up_to_the_batch(preset: type[CurvatureScaled], every: int) -> None:
    whole, parts = network(), network()
    one, many = preset(whole.parameters(), every=every), preset(parts.parameters(), every=every)
    for step in range(4):
        x, y = random(8, 5, seed=step), torch.arange(8) % 3
        one.zero_grad()
        one.backward(F.cross_entropy(whole(x), y))
        one.step()
        many.zero_grad()
        due = many.curvature_due
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            many.backward(F.cross_entropy(parts(a), b) / 4)
            assert many.curvature_due == due
        many.step()
    assert_close(parameters(parts), parameters(whole), 1e-12)


def test_a_graph_can_be_retained() -> None:
    for name, preset in PRESETS.items():
        model = network()
        optimizer = preset(model.parameters())
        loss = loss_of(model)
        optimizer.backward(loss, retain_graph=True)
        backward(optimizer, loss)
        assert next(model.parameters()).curvature is not None, name


def test_step_without_curvature_says_what_to_call() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.named_parameters())
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"0\.weight: call optimizer\.backward\(loss\) or optimizer\.attach\(loss\)"):
        optimizer.step()
    assert_same(parameters(model), parameters(network()))


def test_curvature_is_used_once() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters())
    train(model, optimizer, [0])
    assert all(p.curvature is None for p in model.parameters())
    with pytest.raises(RuntimeError, match="no fresh curvature"):
        optimizer.step()
    hesscale.backward(loss_of(model))
    optimizer.zero_grad()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="no fresh curvature"):
        optimizer.step()


def test_curvature_that_is_not_due_is_dropped() -> None:
    model, other = network(), network()
    optimizer = hesscale.AdaHesScale(model.parameters(), every=2)
    for batch in range(4):
        optimizer.zero_grad()
        hesscale.backward(loss_of(model, batch))
        optimizer.step()
        assert next(model.parameters()).curvature is None
    train(other, hesscale.AdaHesScale(other.parameters(), every=2), range(4))
    assert_same(parameters(model), parameters(other))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_curvature(set_to_none: bool) -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters())
    for batch in range(3):
        optimizer.zero_grad(set_to_none)
        assert all(getattr(p, "curvature", None) is None for p in model.parameters())
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
    other = network()
    train(other, hesscale.AdaHesScale(other.parameters()), range(3))
    assert_close(parameters(model), parameters(other), 1e-15)


def test_a_gradient_of_zero_needs_no_curvature() -> None:
    """As parameters have that the loss never met, after zero_grad(set_to_none=False)."""
    model = network()
    idle = nn.Parameter(random(3))
    idle.grad = torch.zeros(3, dtype=torch.float64)
    train_once = hesscale.AdaHesScale([*model.parameters(), idle])
    train_once.backward(loss_of(model))
    train_once.step()
    assert torch.equal(idle, random(3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["grad", "curvature"])
@pytest.mark.parametrize("foreach", [False, True])
def test_non_finite_values_raise_before_anything_moves(bad: float, which: str, foreach: bool) -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.named_parameters(), foreach=foreach)
    train(model, optimizer, range(2))
    before, state = parameters(model), optimizer.state_dict()["state"][0]["mean_curvature"].clone()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    getattr(model[2].weight, which)[1, 2] = bad
    word = {"grad": "gradient", "curvature": "curvature"}[which]
    with pytest.raises(RuntimeError, match=rf"the {word} of 2\.weight is not finite"):
        optimizer.step()
    assert_same(parameters(model), before)
    assert torch.equal(optimizer.state_dict()["state"][0]["mean_curvature"], state)
    train(model, optimizer, [2])  # and goes on


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"eps": 0.0}, {"scale": "mean"}, {"trust_region": 1.0}], ids=str
)
def test_entries_without_curvature_stay(options: dict[str, Any]) -> None:
    p = nn.Parameter(random(4))
    optimizer = hesscale.AdaHesScale([p], **options)
    for _ in range(3):
        p.grad, p.curvature = torch.ones_like(p), torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64)
        optimizer.step()
    assert torch.isfinite(p).all()
    assert torch.equal((p == random(4)), torch.tensor([False, True, False, True]))


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=str)
def test_a_step_without_curvature_costs_little_more_than_others(options: dict[str, Any]) -> None:
    """As of a network that has learnt its one example: counted in sweeps over memory."""
    p = nn.Parameter(random(100, 100))
    optimizer = hesscale.AdaHesScale([p], **options)
    counts = []
    for g, h in ((1.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1e-200)):
        p.grad, p.curvature = torch.full_like(p, g), torch.full_like(p, h)
        with Counting() as counting:
            optimizer.step()
        counts.append(counting.sweeps)
    assert max(counts[2:]) <= counts[1] + 3  # one look at V, and the two ends that it finds


def test_a_step_is_few_calls() -> None:
    """Of a two-layer MLP, in the steady state."""
    found = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "calls.py"))["counts"]()["optimizer.step"]
    assert found.total() <= 50
    assert len({file for file, _ in found}) <= 5


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_error_counts_parameters(count: int) -> None:
    params = [nn.Parameter(random(3, seed=seed)) for seed in range(4)]
    optimizer = hesscale.AdaHesScale([(f"p{index}", p) for index, p in enumerate(params)])
    for index, p in enumerate(params):
        value = math.nan if index < count else 1.0
        p.grad = p.curvature = torch.full_like(p, value)
    others = {1: "", 2: r" \(and 1 more parameter\)", 4: r" \(and 3 more parameters\)"}[count]
    with pytest.raises(RuntimeError, match=f"^the gradient of p0 is not finite{others}; nothing was changed$"):
        optimizer.step()


def test_a_loss_without_curvature_is_reported() -> None:
    model = nn.Linear(3, 1)
    optimizer = hesscale.AdaHesScale(model.named_parameters())
    optimizer.backward((model(torch.ones(2, 3)) - 1).abs().mean())
    with pytest.warns(UserWarning, match="zero everywhere in weight, bias"):
        optimizer.step()
    assert torch.isfinite(model.weight).all()


def test_a_wrong_shape_is_refused() -> None:
    p = nn.Parameter(random(4))
    p.grad, p.curvature = random(4), random(3)
    with pytest.raises(RuntimeError, match=r"shape \(3,\), the parameter \(4,\)"):
        hesscale.AdaHesScale([p]).step()


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_nothing_is_kept_alive(preset: type[CurvatureScaled]) -> None:
    model = network()
    optimizer = preset(model.parameters())
    train(model, optimizer, range(2))
    loss = loss_of(model)
    backward(optimizer, loss)
    gc.collect()
    gc.disable()
    try:
        kept = [weakref.ref(loss), weakref.ref(model[0].weight.grad), weakref.ref(model[0].weight.curvature)]
        del loss
        optimizer.zero_grad()
        assert [reference() for reference in kept] == [None, None, None]
    finally:
        gc.enable()
