"""A compiled step writes what ``backward`` would write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.compiled.backend import without_mkldnn

from .networks import Tied, assert_same, cross_entropy, pair, small, vectors, words

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def test_training_is_the_eager_one() -> None:
    """50 steps of two micro-batches each, with a schedule, and a smaller batch at the end of each epoch."""
    torch.manual_seed(0)
    ours = Tied().double()
    theirs = copy.deepcopy(ours)
    optimizers = [hesscale.AdaHesScale(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 10, 0.5) for o in optimizers]
    step = optimizers[0].compile(cross_entropy, ours, backend="aot_eager")
    for number in range(50):
        count = 3 if number % 10 == 9 else 6
        for micro in range(2):
            batch = words(count, 2 * number + micro)
            with without_mkldnn():  # whose LSTM rounds otherwise
                loss = cross_entropy(theirs, *batch)
                optimizers[1].backward(loss)
            torch.testing.assert_close(step(*batch), loss.detach(), rtol=1e-12, atol=1e-12)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert_same(ours, theirs, lambda a, b: torch.allclose(a, b, rtol=1e-8, atol=1e-8))
    assert step.compilations == 2


def test_traced_is_eager_bit_by_bit_and_accumulates() -> None:
    torch.manual_seed(0)
    ours, theirs, step = pair(Tied().double())
    for number in range(4):
        with without_mkldnn():
            hesscale.backward(cross_entropy(theirs, *words(5, number)))
        step(*words(5, number))
        assert_same(ours, theirs)
        if number == 1:
            ours.zero_grad()
            theirs.zero_grad()
        if number == 2:  # afresh as well: the curvature belonged to gradients that are zero now
            ours.zero_grad(set_to_none=False)
            theirs.zero_grad(set_to_none=False)
    assert step.compilations == 1


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
def test_methods(method: str) -> None:
    ours, theirs, step = pair(small(), method=method)
    step(*vectors(6))
    hesscale.backward(cross_entropy(theirs, *vectors(6)), method=method)
    assert_same(ours, theirs)
    assert ours[0].weight.curvature.method == method  # type: ignore[union-attr, index]


def test_output_and_whatever_else_the_loss_returns() -> None:
    ours, theirs = small(), small()

    def loss_fn(model: nn.Module, x: Tensor, *, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
        out = model(x)
        q = out.softmax(-1)
        return F.nll_loss(q.log(), y), {"out": out, "kind": "nll", "q": q}

    step = hesscale.compile(loss_fn, ours, method="hesscale_gn", output=lambda loss, more: more["out"], backend="eager")
    x, y = vectors(5)
    loss, more = step(x, y=y)
    expected, theirs_more = loss_fn(theirs, x, y=y)
    hesscale.backward(expected, method="hesscale_gn", output=theirs_more["out"])
    assert_same(ours, theirs)
    assert torch.equal(loss, expected)
    assert more["kind"] == "nll"
    assert torch.equal(more["q"], theirs_more["q"])
    assert not more["q"].requires_grad


def test_frozen_and_unused_parameters_and_inputs_that_require_grad() -> None:
    model = small()
    model[2].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    ours, theirs, step = pair(model)
    (x, y), other = vectors(5), vectors(5)[0].requires_grad_()
    x.requires_grad_()
    step(x, y)
    hesscale.backward(cross_entropy(theirs, other, y))
    assert_same(ours, theirs)
    assert torch.equal(x.grad, other.grad)
    assert torch.equal(x.curvature, other.curvature)  # type: ignore[attr-defined]
    ours[2].bias.requires_grad_(True)  # type: ignore[union-attr, index]
    step(x.detach(), y)
    assert ours[2].bias.curvature is not None  # type: ignore[union-attr, index]
    assert step.compilations == 2


def test_parametrizations() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3).double())
    ours, theirs, step = pair(layer)
    step(*vectors(5))
    hesscale.backward(cross_entropy(theirs, *vectors(5)))
    assert_same(ours, theirs)


def test_hooks_on_parameters_run() -> None:
    ours, theirs, step = pair(small())
    seen: list[int] = []
    for model in (ours, theirs):
        model[0].weight.register_hook(lambda grad: grad * 2)  # type: ignore[union-attr, index, operator]
        model[0].bias.register_post_accumulate_grad_hook(  # type: ignore[union-attr, index, operator]
            lambda p: seen.append(1)
        )
    step(*vectors(5))
    hesscale.backward(cross_entropy(theirs, *vectors(5)))
    assert torch.equal(ours[0].weight.grad, theirs[0].weight.grad)  # type: ignore[union-attr, index, arg-type]
    assert len(seen) == 2


def test_gradients_that_are_one_tensor_or_an_input_are_kept_apart() -> None:
    """Two biases that are added get the same gradient, and w in Σwx gets x itself."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.a, self.b = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x).sum() + (self.a + self.b).pow(2).sum()

    model, x = Sums(), torch.arange(3.0, dtype=torch.float64)
    step = hesscale.compile(lambda m, x: m(x), model, backend="eager")
    step(x)
    grads = [p.grad for p in model.parameters()]
    model.a.grad.mul_(0)  # type: ignore[union-attr]
    model.w.grad.mul_(0)  # type: ignore[union-attr]
    model.a.curvature.mul_(0)  # type: ignore[attr-defined]
    assert torch.equal(x, torch.arange(3.0, dtype=torch.float64))
    assert torch.equal(grads[2], torch.full_like(x, 4.0))  # type: ignore[arg-type]
    assert torch.equal(model.b.curvature, torch.full_like(x, 2.0))  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout_draws_anew_and_again_after_a_seed(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    step = hesscale.compile(cross_entropy, model, backend=backend)
    batch = vectors(5, torch.float32)
    torch.manual_seed(1)
    first = [step(*batch).item() for _ in range(3)]
    assert len(set(first)) == 3
    torch.manual_seed(1)
    assert [step(*batch).item() for _ in range(3)] == first
    model.eval()
    assert step(*batch).item() == step(*batch).item()
    assert step.compilations == 2


def test_buffers_that_are_replaced() -> None:
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.last = x * self.w
            return (self.last - self.mean).square().mean()

    ours, theirs = Average(), Average()
    step = hesscale.compile(lambda m, x: m(x), ours, backend="aot_eager")
    for number in range(3):
        x = vectors(number + 2)[0][:2]
        step(x)
        hesscale.backward(theirs(x))
        assert_same(ours, theirs)
    assert ours.last is None  # tracing leaves nothing without values behind


def test_every_knows_when_curvature_is_due() -> None:
    ours, theirs = small(), small()
    optimizers = [hesscale.AdaHesScaleGN(m.parameters(), lr=1e-2, every=3) for m in (ours, theirs)]
    step = optimizers[0].compile(cross_entropy, ours, backend="eager")
    for _ in range(7):
        due = optimizers[0].curvature_due
        step(*vectors(6))
        assert (getattr(ours[0].weight, "curvature", None) is not None) == due
        optimizers[1].backward(cross_entropy(theirs, *vectors(6)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours, theirs)
    assert step.compilations == 2


def test_mixed_precision() -> None:
    ours, theirs, step = pair(small(torch.float32))
    batch = vectors(6, torch.float32)
    for dtype in (torch.bfloat16, None):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            step(*batch)
            loss = cross_entropy(theirs, *batch)
        hesscale.backward(loss)
        assert_same(ours, theirs)
        ours.zero_grad()
        theirs.zero_grad()
    assert step.compilations == 2


def test_a_loss_scale_is_an_argument() -> None:
    ours, theirs = small(torch.float32), small(torch.float32)
    optimizers = [hesscale.AdaHesScale(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in optimizers]
    step = optimizers[0].compile(lambda m, x, y, scale: scale * cross_entropy(m, x, y), ours, backend="eager")
    for _ in range(3):
        step(*vectors(6, torch.float32), scalers[0].scale(torch.ones(())))
        optimizers[1].backward(scalers[1].scale(cross_entropy(theirs, *vectors(6, torch.float32))))
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(ours, theirs, lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-7))


def test_hooks_of_parameters_run_within_armed_as_well() -> None:
    ours, theirs, step = pair(small())
    optimizer = hesscale.AdaHesScale(ours.parameters(), lr=1e-3)
    for model in (ours, theirs):
        next(model.parameters()).register_hook(lambda grad: 2 * grad)
    with optimizer.armed():
        step(*vectors(5))
    hesscale.backward(cross_entropy(theirs, *vectors(5)))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
