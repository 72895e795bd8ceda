"""Whatever the code of a loss can name is looked at before every call, and what none of it names is not."""

from __future__ import annotations

import argparse
import copy
import functools
import pickle
import types
import weakref
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hesscale

from .networks import assert_same, small, square, vectors

Change = Iterator[tuple[Callable[..., Any], nn.Module]]
"""Gives a loss and its model, and changes something before it goes on."""


X = vectors(6)[0]


def frozen(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double().requires_grad_(False)


def another_dict() -> Change:
    model = small()
    fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) + sum((fisher[name] * p**2).sum() for name, p in model.named_parameters())

    yield loss_fn, model
    fisher = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    yield loss_fn, model
    fisher["0.weight"] = torch.zeros_like(fisher["0.weight"])
    yield loss_fn, model


class Holding(nn.Module):
    """A network that multiplies by ``read`` of what it holds."""

    factor = 1.0

    def __init__(self, held: Any, read: Callable[[Any], Any] = lambda held: held) -> None:
        super().__init__()
        self.inner, self.read = small(), read
        self.__dict__["held"] = held  # a module is not registered

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.read(self.held) * self.factor


class Config:
    beta = 1.0

    def __init__(self, beta: float = 1.0) -> None:
        self.beta = beta


@dataclass(frozen=True)
class Frozen:
    beta: float = 1.0


@dataclass(slots=True)
class Slots:
    beta: float = 1.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.beta * square(model, x)


HELD: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "list": ([1.0], [3.0], lambda held: held[0]),
    "dict of lists": ({"a": [1.0]}, {"a": [3.0]}, lambda held: held["a"][0]),
    "UserDict": (UserDict(a=1.0), UserDict(a=3.0), lambda held: held["a"]),
    "set": ({1.0}, {3.0}, sum),
    "frozenset": (frozenset((1.0,)), frozenset((3.0,)), sum),
    "bool of numpy": (np.bool_(False), np.bool_(True), lambda held: 2 if held else 1),
    "array": (np.ones(1), np.full(1, 3.0), lambda held: float(held[0])),
    "frozen dataclass": (Frozen(), Frozen(3.0), lambda held: held.beta),
    "object": (Config(), Config(3.0), lambda held: held.beta),
    "objects in a list": ([Config()], [Config(3.0)], lambda held: held[0].beta),
    "namespace": (types.SimpleNamespace(a=1.0), types.SimpleNamespace(a=3.0), lambda held: held.a),
    "tuple with a module": ((nn.ReLU(), 1.0), (nn.ReLU(), 3.0), lambda held: held[1]),
    "by another name": ({"a": 1.0}, {"a": 3.0}, lambda held: getattr(held, "get")("a")),  # noqa: B009
}


def replaced(held: Any, other: Any, read: Callable[[Any], Any]) -> Change:
    model = Holding(held, read)
    yield square, model
    model.held = other
    yield square, model


def changed_inside(make: Callable[[dict[str, Any]], Any], read: Callable[[Any], Any]) -> Change:
    inner = {"a": 1.0}
    model = Holding(make(inner), read)
    yield square, model
    inner["a"] = 3.0
    yield square, model


class Listed:
    """Nearly as many entries as there is room for in a call."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.files, self.config = [*map(str, range(4090))], config

    def __len__(self) -> int:
        return len(self.files)


INSIDE: dict[str, tuple[Callable[[dict[str, Any]], Any], Callable[[Any], Any]]] = {
    "chain of dicts": (lambda inner: ChainMap({}, inner), lambda held: held["a"]),
    "view of a dict": (types.MappingProxyType, lambda held: held["a"]),
    "small dict beside a long list": (Listed, lambda held: held.config["a"]),
}


def unregistered_teacher() -> Change:
    model = Holding([frozen(nn.Linear(4, 3))], lambda held: held[0](X))
    yield square, model
    model.held = [frozen(nn.Linear(4, 3), nn.Tanh())]
    yield square, model
    model.held[0][0].weight = nn.Parameter(torch.ones(3, 4, dtype=torch.float64), requires_grad=False)
    yield square, model
    teachers = frozen(nn.Linear(4, 3), nn.Dropout(1.0)), frozen(nn.Linear(4, 3))
    model.held, model.read = teachers, lambda held: held[0](X) + 1
    yield square, model
    teachers[0].eval()
    yield square, model
    kept = weakref.ref(teachers[0]), weakref.ref(teachers[1])
    model.held, model.read = kept[0], lambda held: held()(X)
    yield square, model
    model.held = kept[1]
    yield square, model


class Trainer:
    """As people write them: it holds all sorts of things that change in every step, and a loss reads a few of them."""

    def __init__(self) -> None:
        self.beta, self.cfg, self.steps, self.history = 1.0, Config(), 0, [0.0]
        self.terms = [(nn.MSELoss(), 1.0), (nn.L1Loss(), 0.0)]
        self.model, self.teacher = small(), frozen(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = hesscale.AdaHesScale(self.model.parameters(), every=2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.step = self.optimizer.compile(self.loss, self.model, backend="aot_eager")

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.beta * self._distance(model(x), self.teacher(x)) * self.cfg.beta * self.scale

    def _distance(self, ours: Tensor, theirs: Tensor) -> Tensor:
        return sum(weight * term(ours, theirs) for term, weight in self.terms)  # type: ignore[return-value]

    @property
    def scale(self) -> float:
        return Config.beta + len(self.terms)


def a_trainer() -> Change:
    trainer = Trainer()
    trainer.teacher.eval()
    through = lambda model, x: trainer.loss(model, x)  # noqa: E731
    for change in (
        lambda: setattr(trainer, "beta", 2.0),
        lambda: setattr(trainer.cfg, "beta", 3.0),
        lambda: setattr(trainer, "terms", [(nn.MSELoss(), 0.5), (nn.L1Loss(), 2.0)]),
        lambda: trainer.terms.append((nn.SmoothL1Loss(), 2.0)),
        lambda: setattr(trainer, "teacher", frozen(nn.Linear(4, 3))),
    ):
        yield through, trainer.model
        change()
    yield through, trainer.model


def a_method() -> Change:
    trainer = Trainer()
    trainer.teacher.eval()
    yield trainer.loss, trainer.model
    trainer.terms = [(nn.MSELoss(), 0.5), (nn.L1Loss(), 2.0)]
    yield trainer.loss, trainer.model


SCALE, ARGS = 1.0, argparse.Namespace(beta=1.0)


def below(z: Tensor) -> Tensor:
    return SCALE * z


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return 2 * function(*args)

    return run


@doubled
@torch.enable_grad()
def decorated(model: nn.Module, x: Tensor) -> Tensor:
    return below(square(model, x)) * ARGS.beta


def decorators() -> Change:
    yield decorated, small()
    globals()["SCALE"] = 3.0
    yield decorated, small()
    ARGS.beta = 4.0
    yield decorated, small()


def slots() -> Change:
    loss_fn = Slots()
    yield loss_fn, small()
    loss_fn.beta = 4.0
    yield loss_fn, small()


def attributes_of_classes_and_functions() -> Change:
    class Loss:
        beta = 1.0

        def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
            return self.beta * square(model, x)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return loss_fn.beta * Loss()(model, x)  # type: ignore[attr-defined, no-any-return]

    class Scaled(Holding):
        pass

    model = Scaled(1.0)
    loss_fn.beta = 1.0  # type: ignore[attr-defined]
    yield loss_fn, model
    Loss.beta = 4.0
    yield loss_fn, model
    loss_fn.beta = 4.0  # type: ignore[attr-defined]
    yield loss_fn, model
    Scaled.factor = 2.0
    yield loss_fn, model


CHANGES: dict[str, Callable[[], Change]] = {
    "another dict": another_dict,
    "a teacher in the model": unregistered_teacher,
    "a trainer": a_trainer,
    "a method": a_method,
    "decorators": decorators,
    "slots": slots,
    "classes and functions": attributes_of_classes_and_functions,
    **{name: functools.partial(replaced, *row) for name, row in HELD.items()},
    **{name: functools.partial(changed_inside, *row) for name, row in INSIDE.items()},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_named_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setattr(ARGS, "beta", 1.0)
    x, step, losses = vectors(6)[0], None, []
    for loss_fn, model in CHANGES[name]():
        step = step or hesscale.compile(loss_fn, model, backend="eager")
        step.model = model
        model.zero_grad()
        step(x)
        losses.append(step(x))
        ours = copy.deepcopy([(p.grad / 2, p.curvature / 2) for p in model.parameters()])  # type: ignore[operator]
        torch.testing.assert_close(losses[-1], loss_fn(model, x).detach(), rtol=1e-12, atol=1e-12)
        model.zero_grad()
        hesscale.backward(loss_fn(model, x))
        torch.testing.assert_close(ours, [(p.grad, p.curvature) for p in model.parameters()])  # type: ignore[attr-defined]
    assert step is not None and step.compilations == len(losses) == len({*map(float, losses)})


def test_what_no_code_names_may_change_in_every_step() -> None:
    trainer = Trainer()
    trainer.model.note, trainer.model.history = Config(), []  # type: ignore[assignment]
    x = vectors(6)[0]
    for number in range(6):
        trainer.optimizer.zero_grad()
        trainer.history.append(float(trainer.step(x)))
        trainer.optimizer.step()
        trainer.schedule.step()
        trainer.steps += 1
        trainer.model.note = Config(number)  # type: ignore[assignment]
        trainer.model.history.append(number)  # type: ignore[union-attr, operator]
    assert trainer.step.compilations == 2  # with curvature and without


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_copy_has_its_own_tensors_and_its_own_optimizer(backend: str) -> None:
    ours, x = Trainer(), vectors(6)[0]
    ours.step = ours.optimizer.compile(ours.loss, ours.model, backend=backend)
    ours.step(x)
    copied = copy.deepcopy(ours)
    copied.teacher[1].bias.add_(10.0)  # type: ignore[index, operator]
    assert copied.step.compilations == 0
    loss = copied.step(x)
    assert [int(one.teacher[1].num_batches_tracked) for one in (ours, copied)] == [1, 2]  # type: ignore[index, arg-type]
    torch.testing.assert_close(loss, copied.loss(copied.model, x).detach())
    for _ in range(3):
        copied.step(x)
        copied.optimizer.step()
    assert ours.step.is_due() and not copied.step.is_due()


def test_a_step_is_pickled_without_its_graphs() -> None:
    step = hesscale.compile(square, small(), backend="aot_eager")
    step(vectors(6)[0])
    other = pickle.loads(pickle.dumps(step))
    assert other.compilations == 0
    other.model.zero_grad()
    assert torch.equal(other(vectors(6)[0]), step(vectors(6)[0]))


def test_another_loss_and_another_source() -> None:
    x = vectors(6)[0]
    ours, theirs = small(), small()
    optimizers = [hesscale.AdaHesScale(model.parameters()) for model in (ours, theirs)]
    step = optimizers[0].compile(square, ours, backend="eager")
    step(x)
    step.loss_fn = lambda model, x: 3 * square(model, x).exp()
    other = hesscale.AdaHesScale([torch.ones(1)], rank="full").source
    for optimizer in optimizers:
        optimizer.source = other
        optimizer.zero_grad()
    assert torch.equal(step(x), step.loss_fn(ours, x).detach())
    optimizers[1].backward(step.loss_fn(theirs, x))
    assert_same(ours, theirs, torch.allclose)
    optimizers[0].source = hesscale.AdaHessian([torch.ones(1)]).source
    with pytest.raises(ValueError, match="can be compiled"):
        step(x)


def test_large_containers_are_known_by_themselves() -> None:
    table = [1.0] * 10_000
    step = hesscale.compile(lambda m, x: square(m, x) * table[0], small(), backend="eager")
    x = vectors(6)[0]
    first = step(x)
    table = [2.0] * 10_000
    torch.testing.assert_close(step(x), 2 * first)
    assert step.compilations == 2


def test_what_is_looked_at_is_not_kept_alive() -> None:
    model = Holding(Config(), lambda held: held.beta)
    step = hesscale.compile(square, model, backend="eager")
    step(vectors(6)[0])
    old = weakref.ref(model.held)
    model.held = Config(3.0)
    step(vectors(6)[0])
    assert old() is None


def test_the_log_names_what_grew(caplog: pytest.LogCaptureFixture) -> None:
    model = Holding([1.0], lambda held: sum(held))
    step = hesscale.compile(square, model, backend="eager")
    step(vectors(6)[0])
    model.held.append(2.0)
    with caplog.at_level("INFO", "hesscale.compile"):
        step(vectors(6)[0])
    assert "held" in caplog.text
