"""Whatever changes between two calls, a compiled step does what an eager one would do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale

from .networks import assert_same, cross_entropy, pair, small, vectors

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


class Masked(nn.Module):
    """A number, a function, a tensor that is no buffer, and a layer: all of them may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.layer, self.norm = small(), nn.Tanh(), nn.BatchNorm1d(3).double()
        self.scale, self.function, self.mask = 1.0, torch.sin, torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.layer(self.body(x)))
        return self.function(h * self.scale) * self.mask


CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "a number": (lambda m: setattr(m, "scale", 2.0), 2),
    "a number of a layer": (lambda m: setattr(m.norm, "momentum", 0.5), 2),
    "a function": (lambda m: setattr(m, "function", torch.cos), 2),
    "a tensor": (lambda m: setattr(m, "mask", torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)), 2),
    "a tensor, in place": (lambda m: m.mask.mul_(3), 1),
    "a layer of another class": (lambda m: setattr(m, "layer", nn.ReLU()), 2),
    "a hook": (lambda m: m.layer.register_forward_hook(lambda layer, x, y: y * 2), 2),
    "a parameter": (lambda m: setattr(m.body[0], "weight", nn.Parameter(m.body[0].weight.detach() * 2)), 1),
    "its memory": (lambda m: setattr(m.body[0].weight, "data", m.body[0].weight.data * 2), 1),
    "a buffer": (lambda m: setattr(m.norm, "running_mean", torch.ones(3, dtype=torch.float64)), 1),
    "precision and back": (lambda m: m.float().double(), 1),
}


@pytest.mark.parametrize(("change", "graphs"), CHANGES.values(), ids=CHANGES)
def test_what_changes_in_a_module_is_seen(change: Callable[[Any], Any], graphs: int) -> None:
    ours, theirs, step = pair(Masked())
    for _ in range(2):
        step(*vectors(6))
        hesscale.backward(cross_entropy(theirs, *vectors(6)))
        assert_same(ours, theirs)
        ours.zero_grad()
        theirs.zero_grad()
        change(ours)
        change(theirs)
    step(*vectors(6))
    hesscale.backward(cross_entropy(theirs, *vectors(6)))
    assert_same(ours, theirs)
    assert step.compilations >= graphs


FACTOR = 1.0


def test_what_changes_around_the_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.ones(3, dtype=torch.float64)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weights) * FACTOR

    ours, theirs = small(), small()
    step = hesscale.compile(loss_fn, ours, backend="eager")

    def compare(graphs: int) -> None:
        ours.zero_grad()
        theirs.zero_grad()
        step(*vectors(6))
        hesscale.backward(loss_fn(theirs, *vectors(6)))
        assert_same(ours, theirs)
        assert step.compilations == graphs

    compare(1)
    weights.mul_(torch.tensor([1.0, 2.0, 3.0]))
    compare(1)
    weights = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    compare(2)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    compare(3)


def test_sizes_that_become_numbers_are_not_taken_for_symbols() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, int, float, float]:
        out = model(x).square().sum(1)
        loss = sum((out[i] * (i + 1) for i in range(len(x))), torch.zeros((), dtype=x.dtype)) / float(len(x))
        return loss, x.shape[0], len(x) / 2, x.sum().item()

    ours, theirs = small(), small()
    step = hesscale.compile(loss_fn, ours, backend="aot_eager", dynamic=True)
    for count in (5, 3, 5, 1, 2):
        x = vectors(count)[0]
        found, (loss, *rest) = step(x), loss_fn(theirs, x)
        hesscale.backward(loss)
        assert_same(ours, theirs)
        assert [type(value) for value in found[1:]] == [int, float, float]
        assert [*found[1:]] == rest
    assert step.compilations == 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_numbers_that_depend_on_sizes_and_data_come_back_as_numbers(backend: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, float]]:
        return model(x).square().mean(), {"count": x.shape[0], "sum": x.sum().item()}

    step = hesscale.compile(loss_fn, small(), backend=backend, dynamic=True)
    for count in (5, 7):
        x = vectors(count)[0]
        assert step(x)[1] == {"count": count, "sum": x.sum().item()}
    assert step.compilations == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_layouts_of_a_batch(dynamic: bool) -> None:
    ours, theirs, step = pair(small(), dynamic=dynamic, backend="aot_eager")
    x, y = vectors(6)
    for given in (x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, 2:6], x.expand(6, 4)):
        step(given, y)
        hesscale.backward(cross_entropy(theirs, given, y))
        assert_same(ours, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_arguments_that_are_written_to(backend: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return cross_entropy(model, x + z, y)

    ours, theirs = small(), small()
    step = hesscale.compile(loss_fn, ours, backend=backend)
    (x, y), z = vectors(6), vectors(6)[0]
    other = x.clone()
    for _ in range(2):
        step(x, z, y)
        hesscale.backward(loss_fn(theirs, other, z, y))
        assert_same(ours, theirs)
        assert torch.equal(x, other)
    with pytest.raises(ValueError, match="shares its memory"):
        step(x, x, y)
    assert torch.equal(x, other)


def test_a_leaf_that_is_given_twice() -> None:
    """x·x would be taken for a·b, whose curvature is another."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    model = nn.Linear(3, 1).double()
    step = hesscale.compile(lambda m, a, b: (a * b).square().sum() + m.weight.sum(), model, backend="eager")
    with pytest.raises(ValueError, match="given to the step twice"):
        step(x, x)
    with pytest.raises(ValueError, match="given to the step twice"):
        step(x, model.weight)


def test_modes_around_a_call() -> None:
    ours, theirs, step = pair(small())
    with torch.no_grad():
        step(*vectors(6))
    hesscale.backward(cross_entropy(theirs, *vectors(6)))
    assert_same(ours, theirs)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        step(*vectors(6))
    assert_same(ours, theirs)


def test_hooks_on_activations_and_copies_of_a_model() -> None:
    model = small()
    model[1].register_full_backward_hook(lambda layer, before, behind: (before[0] * 2,))  # type: ignore[index]
    ours, theirs, step = pair(model)
    step(*vectors(6))
    hesscale.backward(cross_entropy(theirs, *vectors(6)))
    assert_same(ours, theirs)
    twin = copy.deepcopy(ours)  # torch copies no gradients
    theirs.zero_grad()
    nn.init.zeros_(ours[0].weight)  # type: ignore[index, arg-type]
    hesscale.compile(cross_entropy, twin, backend="eager")(*vectors(6))
    hesscale.backward(cross_entropy(theirs, *vectors(6)))
    assert_same(twin, theirs)
