"""Whatever changes between two calls, a compiled model does what an eager one would do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale

from .networks import assert_same, close, compare, compiled, cross_entropy, small, vectors


def assert_agree(
    ours: nn.Module, theirs: nn.Module, loss_fn: Callable[..., Tensor], function: Any, *batch: Any
) -> None:
    """A pass of each: ``function`` is the compiled model, or the compiled loss."""
    loss = loss_fn(function, *batch) if isinstance(function, nn.Module) else function(ours, *batch)
    hesscale.backward(loss)
    hesscale.backward(loss_fn(theirs, *batch))
    assert_same(ours, theirs, close())


class Masked(nn.Module):
    """A number, a function, a tensor that is no buffer, and a layer: all of them may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.layer, self.norm = small(), nn.Tanh(), nn.BatchNorm1d(3).double()
        self.scale, self.function, self.mask = 1.0, torch.sin, torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.layer(self.body(x)))
        return self.function(h * self.scale) * self.mask


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m, "scale", 2.0),
    "a number of a layer": lambda m: setattr(m.norm, "momentum", 0.5),
    "a function": lambda m: setattr(m, "function", torch.cos),
    "a tensor": lambda m: setattr(m, "mask", torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)),
    "a tensor, in place": lambda m: m.mask.mul_(3),
    "a layer of another class": lambda m: setattr(m, "layer", nn.ReLU()),
    "a hook": lambda m: m.layer.register_forward_hook(lambda layer, x, y: y * 2),
    "a parameter": lambda m: setattr(m.body[0], "weight", nn.Parameter(m.body[0].weight.detach() * 2)),
    "its memory": lambda m: setattr(m.body[0].weight, "data", m.body[0].weight.data * 2),
    "a frozen parameter": lambda m: m.body[0].weight.requires_grad_(False),
    "a tied parameter": lambda m: setattr(m.body[2], "bias", m.norm.bias),
    "a buffer": lambda m: setattr(m.norm, "running_mean", torch.ones(3, dtype=torch.float64)),
    "precision and back": lambda m: m.float().double(),
    "evaluation": lambda m: m.eval(),
}


@pytest.mark.parametrize("whole", [False, True], ids=["loss outside", "whole loss"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_in_a_module_is_seen(change: Callable[[Any], Any], whole: bool) -> None:
    ours = Masked()
    theirs = copy.deepcopy(ours)
    function = compiled(cross_entropy if whole else ours)
    assert_agree(ours, theirs, cross_entropy, function, *vectors(6))
    for model in (ours, theirs):
        model.zero_grad()
        change(model)
    assert_agree(ours, theirs, cross_entropy, function, *vectors(6))


FACTOR = 1.0


class Flavor(Enum):
    SWEET = 1.0
    SOUR = 3.0


def test_what_changes_around_the_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global, and what a closure holds: tensors, numbers, objects, functions, modules."""
    weights, criterion = torch.ones(3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)
    power: Any = 2.0
    flavor, function = Flavor.SWEET, partial(torch.pow, exponent=2)
    options = {"scale": [1.0, 2.0]}

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = function(criterion(model(x))) * flavor.value * options["scale"][0]
        return F.cross_entropy(z, y, weights) * FACTOR + (z + 2).abs().pow(float(power)).mean()

    def changes() -> Iterator[None]:
        nonlocal weights, power, flavor, function
        yield
        yield weights.mul_(torch.tensor([1.0, 2.0, 3.0]))
        weights = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
        yield
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
        yield
        power = np.float64(3.0)
        yield
        flavor = Flavor.SOUR
        yield
        function = partial(torch.pow, exponent=3)
        yield
        options["scale"][0] = 2.0
        yield
        criterion.momentum = 0.5
        yield criterion.eval()
        criterion.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
        yield

    ours, theirs = small(), small()
    ours_fn = compiled(loss_fn)
    with torch._dynamo.config.patch(recompile_limit=32):
        for _ in changes():
            ours.zero_grad()
            theirs.zero_grad()
            state = copy.deepcopy(criterion.state_dict())
            loss = ours_fn(ours, *vectors(6))
            hesscale.backward(loss)
            after = criterion.state_dict()
            criterion.load_state_dict(state)
            hesscale.backward(loss_fn(theirs, *vectors(6)))
            assert_same(ours, theirs, close())
            assert all(
                torch.allclose(a, b) for a, b in zip(after.values(), criterion.state_dict().values(), strict=True)
            )


@pytest.mark.parametrize("dynamic", [None, True])
def test_layouts_of_a_batch(dynamic: bool | None) -> None:
    x, y = vectors(6)
    layouts = (x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, 2:6], x[:1].expand(6, 4))
    compare(small(), *((given, y) for given in layouts), whole=True, compile_options={"dynamic": dynamic})


@pytest.mark.parametrize("whole", [False, True], ids=["a region before", "one region"])
def test_tensors_that_are_written_to(whole: bool) -> None:
    """Arguments, one that requires grad, and one that is given twice."""

    def loss_fn(model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        h = model(x + z)
        if not whole:
            torch._dynamo.graph_break()
        h.mul_(h.detach().cos())
        return F.cross_entropy(h, y)

    ours, theirs = small(), small()
    function = compiled(loss_fn)
    (x, y), z = vectors(6), vectors(6)[0]
    other = x.clone()
    for _ in range(2):
        hesscale.backward(function(ours, x, z, y))
        hesscale.backward(loss_fn(theirs, other, z, y))
        assert_same(ours, theirs, close())
        assert torch.equal(x, other)
    hesscale.backward(function(ours, x, x, y))
    hesscale.backward(loss_fn(theirs, other, other, y))
    assert_same(ours, theirs, close())
    assert torch.equal(x, other)


def test_a_leaf_that_is_given_twice() -> None:
    """x·x is one function of x, and not a·b."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    function = compiled(lambda a, b: (a * b).square().sum())
    (found,) = hesscale.diagonal(function(x, x), x)
    torch.testing.assert_close(found, 12 * x.detach() ** 2)
    (found,) = hesscale.diagonal(function(x, torch.ones_like(x)), x)
    torch.testing.assert_close(found, torch.full_like(x, 2.0))


def test_modes_around_a_call() -> None:
    ours, theirs = small(), small()
    function, (x, y) = compiled(ours), vectors(6)
    with torch.no_grad():
        assert torch.allclose(function(x), theirs(x))
    assert_agree(ours, theirs, cross_entropy, function, x, y)
    with torch.inference_mode():
        assert torch.allclose(function(x), theirs(x))
    assert_agree(ours, theirs, cross_entropy, function, x, y)


def test_attributes_that_a_model_replaces() -> None:
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.calls += 1
            return (x * self.w - self.mean).square().mean() * self.calls

    ours, theirs = Average(), Average()
    function = compiled(ours)
    for number in range(3):
        x = vectors(number + 2)[0]
        hesscale.backward(function(x))
        hesscale.backward(theirs(x))
        assert_same(ours, theirs, close())


def test_dropout_draws_anew_and_again_after_a_seed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    function, batch = compiled(model), vectors(5, torch.float32)
    torch.manual_seed(1)
    first = [cross_entropy(function, *batch).item() for _ in range(3)]
    assert len(set(first)) == 3
    torch.manual_seed(1)
    assert [cross_entropy(function, *batch).item() for _ in range(3)] == first


def test_dropout_in_the_backward_pass_is_that_of_the_forward_pass() -> None:
    """Of y = dropout(w)², which entries were dropped is seen from y, and so are gradient and curvature."""
    w = torch.ones(64, dtype=torch.float64, requires_grad=True)
    function = compiled(lambda w: F.dropout(w, 0.5).square())
    y = function(w)
    hesscale.backward(y.sum())
    torch.testing.assert_close(w.grad, 2 * y.detach())
    torch.testing.assert_close(w.curvature, 2 * y.detach())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("dims", "mode"), [(1, "linear"), (2, "bilinear"), (2, "bicubic"), (2, "nearest")])
def test_interpolation_of_any_size_is_one_operation(dims: int, mode: str) -> None:
    def loss_fn(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode=mode).sin().sum()

    function = compiled(loss_fn, dynamic=True)
    for size in (3, 4, 5):
        x = torch.randn(2, 3, *[size] * dims, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(hesscale.diagonal(function(x), x), hesscale.diagonal(loss_fn(x), x))


def test_a_parameter_that_changes_between_forward_and_backward() -> None:
    model, (x, y) = small(), vectors(6)
    loss = cross_entropy(compiled(model), x, y)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was written to"):
        hesscale.backward(loss)
    assert all(p.grad is None for p in model.parameters())
