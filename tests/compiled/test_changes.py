"""Whatever changes between two calls, a compiled step does what an eager one would do."""

from __future__ import annotations

import copy
from collections import UserDict
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

    def scaled(self, x: Tensor) -> Any:
        return 2 * self.body(x)


CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "a number": (lambda m: setattr(m, "scale", 2.0), 2),
    "a number of a layer": (lambda m: setattr(m.norm, "momentum", 0.5), 2),
    "a function": (lambda m: setattr(m, "function", torch.cos), 2),
    "a tensor": (lambda m: setattr(m, "mask", torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)), 2),
    "a tensor, in place": (lambda m: m.mask.mul_(3), 1),
    "a layer of another class": (lambda m: setattr(m, "layer", nn.ReLU()), 2),
    "a method of its class": (lambda m: setattr(Masked, "forward", Masked.scaled), 2),
    "a hook": (lambda m: m.layer.register_forward_hook(lambda layer, x, y: y * 2), 2),
    "a parameter": (lambda m: setattr(m.body[0], "weight", nn.Parameter(m.body[0].weight.detach() * 2)), 1),
    "its memory": (lambda m: setattr(m.body[0].weight, "data", m.body[0].weight.data * 2), 1),
    "a buffer": (lambda m: setattr(m.norm, "running_mean", torch.ones(3, dtype=torch.float64)), 1),
    "precision and back": (lambda m: m.float().double(), 1),
}


@pytest.mark.parametrize(("change", "graphs"), CHANGES.values(), ids=CHANGES)
def test_what_changes_in_a_module_is_seen(
    change: Callable[[Any], Any], graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Masked, "forward", Masked.forward)  # and back afterwards
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


def test_a_hook_of_all_modules_is_seen() -> None:
    ours, theirs, step = pair(small())
    step(*vectors(6))
    ours.zero_grad()
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, out: 2 * out)
    try:
        step(*vectors(6))
        hesscale.backward(cross_entropy(theirs, *vectors(6)))
    finally:
        handle.remove()
    assert_same(ours, theirs)


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


class Flavor(Enum):
    SWEET = 1.0
    SOUR = 3.0


OTHER_NUMBERS: list[tuple[Any, Any]] = [
    (np.float64(1.0), np.float64(3.0)),
    (np.float32(1.0), np.float32(3.0)),
    ((1.0, (2, torch.Size([3]))), (1.0, (2, torch.Size([4])))),
    (Flavor.SWEET, Flavor.SOUR),
    (slice(0, 1), slice(0, 2)),
    (partial(pow, exp=2), partial(pow, exp=3)),
    (1, True),
    (2 + 0j, 3 + 0j),
]


@pytest.mark.parametrize("values", OTHER_NUMBERS, ids=repr)
def test_values_of_any_plain_kind_are_seen(values: tuple[Any, Any]) -> None:
    model = small()
    value = values[0]
    step = hesscale.compile(lambda m, x: (value, m(x).square().mean())[1], model, backend="eager")
    x = torch.randn(2, 4, dtype=torch.float64)
    for count, other in enumerate((*values, values[1]), 1):
        value = other
        step(x)
        assert step.compilations == min(count, 2)
    step(x)
    assert step.compilations == 2


def test_a_tensor_is_known_by_itself_and_not_by_its_address() -> None:
    model, x = small(), torch.randn(2, 4, dtype=torch.float64)
    weights: Tensor | None = None

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        assert weights is not None
        return model(x).square().mean() / weights.numel()

    step = hesscale.compile(loss_fn, model, backend="eager")
    for count in range(2, 9):
        weights = None
        weights = torch.ones(count)
        assert step(x) == loss_fn(model, x)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.power, self.norm = 2.0, nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, z: Tensor) -> Tensor:
        return (self.norm(z) + 2).abs().pow(self.power).mean()

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return self(model(x))


class Plain:
    power = 2.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().pow(self.power).mean()


@pytest.mark.parametrize("way", ["closure", "method", "argument", "partial"])
def test_modules_beside_the_model_are_seen(way: str) -> None:
    model, criterion, x = small(), Criterion(), torch.randn(5, 4, dtype=torch.float64)
    given = (criterion,) if way == "argument" else ()
    losses: dict[str, Any] = {
        "closure": lambda m, x: criterion(m(x)),
        "method": criterion.loss,
        "argument": lambda m, x, c: c(m(x)),
        "partial": partial(lambda c, m, x: c(m(x)), criterion),
    }
    step = hesscale.compile(losses[way], model, backend="eager")

    def changes() -> Iterator[None]:
        yield
        criterion.power = 3.0
        yield
        criterion.eval()
        yield
        criterion.norm.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
        yield

    criterion.requires_grad_(False)
    for count, _ in enumerate(changes(), 1):
        criterion.requires_grad_(False)
        criterion.norm.reset_running_stats()
        ours = step(x, *given)
        criterion.norm.reset_running_stats()
        torch.testing.assert_close(ours, losses[way](model, x, *given).detach())
        assert step.compilations == count


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []  # type: ignore[var-annotated]

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(z)
        return z.square().mean()


class CountingObject:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return model(x).square().mean()


def test_what_a_pass_counts_beside_the_model_means_no_new_graph() -> None:
    model, criterion, counting, x = small(), Counting(), CountingObject(), torch.randn(5, 4, dtype=torch.float64)
    for loss_fn in (lambda m, x: criterion(m(x)), counting):
        step = hesscale.compile(loss_fn, model, backend="eager")
        for _ in range(3):
            step(x)
        assert step.compilations == 1
    assert criterion.calls == counting.calls == 0 and criterion.seen == []


def test_attributes_of_a_callable_object_are_seen() -> None:
    model, loss_fn, x = small(), Plain(), torch.randn(5, 4, dtype=torch.float64)
    step = hesscale.compile(loss_fn, model, backend="eager")
    for power in (2.0, 3.0):
        loss_fn.power = power
        torch.testing.assert_close(step(x), loss_fn(model, x).detach())


class Batch:
    x = torch.ones(2, 4)


@pytest.mark.parametrize("given", [Batch(), UserDict(x=1), np.ones(3), {1, 2}], ids=lambda value: type(value).__name__)
def test_arguments_whose_changes_would_not_be_seen_are_refused(given: Any) -> None:
    step = hesscale.compile(lambda m, b: m(b).mean(), small(), backend="eager")
    with pytest.raises(TypeError, match=r"an argument of the step is a \w+, of which changes would not be seen"):
        step(given)
    assert step.compilations == 0


def test_what_cannot_be_compiled_is_said_in_a_sentence() -> None:
    def step(loss_fn: Any, model: nn.Module | None = None, **options: Any) -> Any:
        return hesscale.compile(loss_fn, model or small(), backend="eager", **options)

    x = torch.randn(3, 4, dtype=torch.float64)
    negative = torch.randn(3, 4, dtype=torch.complex128).conj().imag
    with pytest.raises(ValueError, match="conjugate or negative view"):
        step(lambda m, x: m(x).square().mean())(negative)
    with pytest.raises(RuntimeError, match="there is no graph to walk"):
        step(lambda m, x: m(x).square().mean().detach())(x)
    with pytest.raises(RuntimeError, match="there is no graph to walk"):
        step(lambda m, x: m(x).square().mean(), small().requires_grad_(False))(x)
    with pytest.raises(ValueError, match="lazy modules"):
        step(lambda m, x: m(x).square().mean(), nn.LazyLinear(3))(x)
    optimizer = hesscale.AdaHesScale(small().parameters(), lr=1e-3)
    with pytest.raises(TypeError, match="the optimizer says which rank is compiled"):
        optimizer.compile(lambda m, x: m(x).mean(), small(), rank=1)


def test_a_size_as_exponent_is_right_or_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) ** x.shape[0]).mean()

    ours, theirs, x = small(), small(), torch.randn(3, 4, dtype=torch.float64)
    step = hesscale.compile(loss_fn, ours, backend="eager", dynamic=True)
    try:  # torch can trace it from 2.15 on
        step(x)
    except RuntimeError as error:
        assert "leave dynamic=True out" in str(error)
    else:
        hesscale.backward(loss_fn(theirs, x))
        assert_same(ours, theirs)
