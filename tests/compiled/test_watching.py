"""What happens unseen while ``loss_fn`` runs is either done again by every compiled call, or refused."""

from __future__ import annotations

import copy
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hesscale

from .networks import assert_same, cross_entropy, pair, small, square, vectors


class Rewired(nn.Module):
    """Two layers, of which a third name is one; all parameters have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4).double() for _ in range(3))
        self.active = self.a
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Any:
        return self.c(self.active(x))


def other_layer(model: Any) -> None:
    model.active = model.b


def other_weight(model: Any) -> None:
    model.c.weight = model.b.weight


@pytest.mark.parametrize("rewire", [other_layer, other_weight])
def test_what_is_tied_anew_is_seen(rewire: Callable[[nn.Module], None]) -> None:
    ours, theirs, step = pair(Rewired())
    for _ in range(2):
        step(*vectors(6))
        hesscale.backward(cross_entropy(theirs, *vectors(6)))
        assert_same(ours, theirs)
        for model in (ours, theirs):
            model.zero_grad()
            rewire(model)
    assert step.compilations == 2


class Remembering(nn.Module):
    """Buffers that a forward pass replaces: by each other, and two of them by one tensor."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(4, 3).double(), way
        self.last, self.before, self.best = (nn.Buffer(torch.full((3,), n, dtype=torch.float64)) for n in (0.0, 1, 2))

    def forward(self, x: Tensor) -> Any:
        z = self.inner(x) - self.last - 2 * self.before + 3 * self.best
        if self.way == "shift":
            self.before = self.last
            self.last = z.detach().mean(0)
        elif self.way == "swap":
            self.last, self.before = self.before, self.last
        else:
            self.last = z.detach().mean(0)
            self.best = self.last
        return z


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["shift", "swap", "one for two"])
def test_buffers_that_replace_each_other(way: str, backend: str) -> None:
    ours, theirs, step = pair(Remembering(way), backend=backend)
    for _ in range(3):
        step(*vectors(6))
        hesscale.backward(cross_entropy(theirs, *vectors(6)))
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers(remove_duplicate=False)))


class Centered(nn.Module):
    """A criterion that keeps a mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Buffer(torch.zeros(3, dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        loss = (z - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * z.detach().mean(0)
        return loss


def test_buffers_of_a_criterion_beside_the_model_are_replaced() -> None:
    model, criterion, other = small(), Centered(), Centered()
    step = hesscale.compile(lambda m, x: criterion(m(x)), model, backend="eager")
    for seed in range(3):
        x = vectors(5 + seed)[0]
        torch.testing.assert_close(step(x), other(model(x)).detach())
        torch.testing.assert_close(criterion.center, other.center)


def test_what_is_noted_on_parameters_is_seen() -> None:
    model, x = small(), vectors(6)[0]
    for name, p in model.named_parameters():
        p.decay = name.endswith("weight")  # type: ignore[attr-defined]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        decayed = [p for p in model.parameters() if p.decay and isinstance(p, nn.Parameter)]  # type: ignore[attr-defined]
        return model(x).square().mean() + sum(p.square().sum() for p in decayed)

    step = hesscale.compile(loss_fn, model, backend="eager")
    for decays in (False, True):
        model[0].bias.decay = decays  # type: ignore[union-attr, assignment]
        torch.testing.assert_close(step(x), loss_fn(model, x).detach())


SCALE = 1.0


def test_names_in_comprehensions_and_defaults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(model: nn.Module, x: Tensor, *, power: float = 2.0) -> Tensor:
        return sum([SCALE * z.pow(power).mean() for z in (model(x),)])  # type: ignore[return-value]

    model, x = small(), vectors(6)[0]
    step = hesscale.compile(loss_fn, model, backend="eager")
    torch.testing.assert_close(step(x), loss_fn(model, x).detach())
    monkeypatch.setitem(globals(), "SCALE", 10.0)
    torch.testing.assert_close(step(x), loss_fn(model, x).detach())
    loss_fn.__kwdefaults__["power"] = 4.0
    torch.testing.assert_close(step(x), loss_fn(model, x).detach())


class Weight:
    factor = 1.0

    def apply(self, z: Tensor) -> Tensor:
        return self.factor * z


def test_functions_among_arguments_and_around_output_are_seen() -> None:
    model, x, weight, place = small(), vectors(6)[0], Weight(), 0
    step = hesscale.compile(lambda m, x, f: f(m(x)).square().mean(), model, backend="eager")
    for factor in (1.0, 10.0):
        weight.factor = factor
        torch.testing.assert_close(step(x, weight.apply), (factor * model(x)).square().mean().detach())

    def loss_fn(model: Any, x: Tensor) -> Any:
        hidden = model[1](model[0](x))
        out = model[2](hidden).tanh()
        return out.square().mean(), hidden, out

    ours, theirs = small(), small()
    gauss_newton = hesscale.compile(
        loss_fn, ours, backend="eager", method="hesscale_gn", output=lambda loss, *two: two[place]
    )
    for place in (0, 1):
        gauss_newton(x)
        loss, *two = loss_fn(theirs, x)
        hesscale.backward(loss, method="hesscale_gn", output=two[place])
        assert_same(ours, theirs)
        ours.zero_grad()
        theirs.zero_grad()


def test_a_tensor_of_the_closure_with_new_memory_is_seen() -> None:
    model, x, weights = small(), vectors(6)[0], torch.ones(4, dtype=torch.float64)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * weights.sum() / weights.numel() ** 2).square().mean()

    step = hesscale.compile(loss_fn, model, backend="eager")
    step(x)
    weights.data = torch.ones(8, dtype=torch.float64)
    torch.testing.assert_close(step(x), loss_fn(model, x).detach())


def test_signs_of_zeros_matter_and_nan_is_one_number() -> None:
    step = hesscale.compile(lambda m, x, scale: (m(x) * scale).square().mean(), small(), backend="eager")
    for scale in (0.0, -0.0, float("nan"), -float("nan")):
        step(vectors(6)[0], scale)
    assert step.compilations == 3


MODES = {1: ("linear",), 2: ("bilinear", "bicubic", "nearest"), 3: ("trilinear",)}


@pytest.mark.parametrize(("dims", "mode"), [(dims, mode) for dims, modes in MODES.items() for mode in modes])
def test_interpolation_of_any_size_is_one_operation(dims: int, mode: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.interpolate(model(x), scale_factor=2, mode=mode).square().mean()

    ours = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](1, 2, 1).double()
    theirs = copy.deepcopy(ours)
    step = hesscale.compile(loss_fn, ours, backend="eager", dynamic=True)
    for size in (4, 3):
        x = torch.randn(2, 1, *[size] * dims, dtype=torch.float64)
        step(x)
        hesscale.backward(loss_fn(theirs, x))
        assert_same(ours, theirs, torch.allclose)


def test_an_argument_of_any_size_gets_curvature() -> None:
    model = small()
    step = hesscale.compile(lambda m, x: m(x).square().mean(), model, backend="eager", dynamic=True)
    for count in (5, 3, 7):
        ours, theirs = (vectors(count)[0].requires_grad_() for _ in range(2))
        step(ours)
        hesscale.backward(model(theirs).square().mean())
        torch.testing.assert_close(ours.curvature, theirs.curvature)  # type: ignore[attr-defined]
    assert step.compilations == 1


def test_a_hook_that_clears_a_gradient_starts_curvature_afresh() -> None:
    ours, theirs, step = pair(small())
    for model in (ours, theirs):
        bias: Any = model[2].bias  # type: ignore[index]
        bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for _ in range(3):
        step(*vectors(6))
        hesscale.backward(cross_entropy(theirs, *vectors(6)))
        assert_same(ours, theirs)


def test_hooks_of_several_parameters_run_once() -> None:
    model, calls = small(), []
    for p in model.parameters():
        p.register_hook(lambda grad: None)
    torch.autograd.graph.register_multi_grad_hook([*model.parameters()], lambda grads: calls.append(len(grads)))
    hesscale.compile(cross_entropy, model, backend="eager")(*vectors(6))
    assert calls == [4]


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.last: deque[Tensor] = deque(maxlen=2)
        self.logs: dict[str, list[Tensor]] = {"z": []}
        self.notes = types.SimpleNamespace(hidden=None, seen=set())

    def forward(self, x: Tensor) -> Any:
        z = self.inner(x)
        self.last.append(z)
        self.logs["z"].append(z)
        self.notes.hidden = z
        self.notes.seen.add(z)
        return z


def test_nothing_of_a_trace_stays_in_containers_and_objects() -> None:
    model = Logging()
    hesscale.compile(square, model, backend="eager")(vectors(6)[0])
    assert not model.last and model.logs == {"z": []} and model.notes.hidden is None and not model.notes.seen


def test_cached_parametrizations_keep_their_values() -> None:
    model, (x, y) = nn.Linear(4, 3).double(), vectors(6)
    parametrize.register_parametrization(model, "weight", nn.Tanh())
    step = hesscale.compile(cross_entropy, model, backend="eager")
    with parametrize.cached():
        before = model(x)
        torch.testing.assert_close(step(x, y), F.cross_entropy(before, y).detach())
        assert torch.equal(model(x), before)


def test_two_threads_trace_one_after_the_other() -> None:
    enabled, failures, running = torch.backends.mkldnn.enabled, [], []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        running.append(threading.get_ident())
        assert len({*running}) == 1
        loss = square(model, x)
        running.clear()
        return loss

    def run() -> None:
        try:
            hesscale.compile(loss_fn, small(), backend="eager")(vectors(6)[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and torch.backends.mkldnn.enabled == enabled
