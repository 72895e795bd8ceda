"""The optimizers of the cost comparison as a table: how their users make a step, with hesscale or another library.

The step size is next to nothing, so that the network stays the same.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

import hesscale
from hesscale.optim import CurvatureScaled

from ..tasks.cost_networks import Problem

STEP_SIZE = 1e-8
UNIT, HARDEST = "Adam", "Adam fused"
"""The unit of all costs, and the fastest first-order step."""

_FEASIBLE = 2e9  # entries that the passes of an exact diagonal may write


@dataclass(frozen=True)
class Step:
    """The parts of one training step, in the order in which they are called."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], Any]
    update: Callable[[], Any]
    clear: Callable[[], Any]

    def __call__(self) -> None:
        """Makes the step."""
        self.backward(self.forward())
        self.update()
        self.clear()


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    name: str
    step: Callable[[Problem], Step]
    fits: Callable[[Problem], bool] = lambda problem: True
    period: int = 1  # the number of steps after which the cost repeats
    exact: bool = False  # an exact diagonal, which the others approximate
    package: tuple[str, str] | None = None  # the module that it needs, and what to install

    @property
    def installed(self) -> bool:
        """Whether the package it needs is there."""
        return self.package is None or importlib.util.find_spec(self.package[0]) is not None


def _first_order(kind: Callable[..., Optimizer], problem: Problem, **options: Any) -> Step:
    optimizer = kind(problem.network.parameters(), lr=STEP_SIZE, **options)
    return Step(problem.loss, Tensor.backward, optimizer.step, optimizer.zero_grad)


def _second_order(kind: Callable[..., Any], problem: Problem, **options: Any) -> Step:
    optimizer = kind(problem.network.parameters(), lr=STEP_SIZE, **options)
    return Step(problem.loss, optimizer.backward, optimizer.step, optimizer.zero_grad)


def _hutchinson(problem: Problem) -> Step:
    optimizer = hesscale.AdaHessian(problem.network.parameters(), lr=STEP_SIZE)
    return Step(_twice_differentiable(problem), optimizer.backward, optimizer.step, optimizer.zero_grad)


def _twice_differentiable(problem: Problem) -> Callable[[], Tensor]:
    """The loss without fused attention, which has no second derivative."""
    if not any(isinstance(module, nn.MultiheadAttention) for module in problem.network.modules()):
        return problem.loss

    def loss() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return problem.loss()

    return loss


def _exact(estimator: str, problem: Problem) -> Step:
    """Adam on an exact diagonal; the estimator's own forward pass counts as backward."""
    optimizer = CurvatureScaled(problem.network.parameters(), lr=STEP_SIZE)
    batch = (problem.inputs, problem.targets)

    def backward(loss: Tensor) -> None:
        loss.backward()
        diagonal = hesscale.estimate(estimator, problem.network, F.cross_entropy, batch)
        for name, p in problem.network.named_parameters():
            p.curvature = diagonal[name]  # type: ignore[attr-defined]

    return Step(problem.loss, backward, optimizer.step, optimizer.zero_grad)


def _ggn_is_feasible(problem: Problem) -> bool:
    """As many passes as outputs, at batch 1, as in the paper."""
    with torch.no_grad():
        outputs = problem.network(problem.inputs).numel()
    return len(problem.inputs) == 1 and outputs * problem.parameters <= _FEASIBLE


def _hessian_is_feasible(problem: Problem) -> bool:
    """As many passes as parameters, at batch 1."""
    return len(problem.inputs) == 1 and problem.parameters**2 <= _FEASIBLE


def _backpack_ggn_mc(problem: Problem) -> Step:
    """BackPACK's one-sample Gauss-Newton diagonal with our Adam-like update, of which it has none."""
    backpack, extensions = (importlib.import_module(name) for name in ("backpack", "backpack.extensions"))
    network, loss_fn = backpack.extend(problem.network), backpack.extend(nn.CrossEntropyLoss())
    params = list(network.parameters())
    optimizer = CurvatureScaled(params, lr=STEP_SIZE)

    def backward(loss: Tensor) -> None:
        with backpack.backpack(extensions.DiagGGNMC(mc_samples=1)):
            loss.backward()
        for p in params:
            p.curvature = p.diag_ggn_mc

    return Step(
        lambda: loss_fn(network(problem.inputs), problem.targets), backward, optimizer.step, optimizer.zero_grad
    )


def _is_chain(problem: Problem) -> bool:
    """BackPACK sees modules, not the graph: without conversion it needs a chain of plain ones."""
    network = problem.network
    return isinstance(network, nn.Sequential) and not any(any(module.children()) for module in network)


def _pytorch_optimizer_adahessian(problem: Problem) -> Step:
    """pytorch_optimizer's, whose step makes the second backward pass."""
    kind = importlib.import_module("pytorch_optimizer").AdaHessian
    optimizer = kind(problem.network.parameters(), lr=STEP_SIZE)
    backward = functools.partial(Tensor.backward, create_graph=True)
    return Step(_twice_differentiable(problem), backward, optimizer.step, optimizer.zero_grad)


def _compiled_loss(problem: Problem, backend: str, **options: Any) -> Callable[[], Tensor]:
    """Network and loss, compiled by torch.compile for this problem alone.

    The code object is a copy: by code objects torch.compile counts what it has compiled before, gives up after eight
    times, and makes sizes dynamic that have changed.
    """
    loss = FunctionType(Problem.loss.__code__.replace(), Problem.loss.__globals__)
    return functools.partial(torch.compile(loss, dynamic=False, backend=backend, **options), problem)


def _compiled_first_order(problem: Problem) -> Step:
    """Adam on a network and a loss that torch.compile has compiled."""
    optimizer = torch.optim.Adam(problem.network.parameters(), lr=STEP_SIZE)
    return Step(_compiled_loss(problem, "inductor"), Tensor.backward, optimizer.step, optimizer.zero_grad)


def _compiled_second_order(problem: Problem, **options: Any) -> Step:
    """AdaHesScale on a network and a loss that torch.compile has compiled for curvature passes."""
    optimizer = hesscale.AdaHesScale(problem.network.parameters(), lr=STEP_SIZE)
    forward = _compiled_loss(problem, "hesscale", **options)
    return Step(forward, optimizer.backward, optimizer.step, optimizer.zero_grad)


def _pass(problem: Problem, *, curvature: bool = False, backend: str = "", **options: Any) -> Step:
    """Forward and backward, perhaps with curvature, without an optimizer."""
    forward = _compiled_loss(problem, backend, **options) if backend else problem.loss
    backward = hesscale.backward if curvature else Tensor.backward
    return Step(forward, backward, lambda: None, problem.network.zero_grad)


def _row(name: str, make: Callable[..., Step], kind: Callable[..., Any], *, period: int = 1, **options: Any) -> Method:
    return Method(name, functools.partial(make, kind, **options), period=period)


METHODS: tuple[Method, ...] = (
    _row("SGD", _first_order, torch.optim.SGD),
    _row(UNIT, _first_order, torch.optim.Adam),
    _row(HARDEST, _first_order, torch.optim.Adam, fused=True),
    _row("AdaHesScale", _second_order, hesscale.AdaHesScale),
    _row("AdaHesScale every=10", _second_order, hesscale.AdaHesScale, period=10, every=10),
    _row("AdaHesScale rank=1", _second_order, hesscale.AdaHesScale, rank=1),
    _row("AdaHesScale rank=3", _second_order, hesscale.AdaHesScale, rank=3),
    _row("AdaHesScaleGN", _second_order, hesscale.AdaHesScaleGN),
    _row("AdaBL89", _second_order, hesscale.AdaBL89),
    _row("AdaGGNMC", _second_order, hesscale.AdaGGNMC),
    Method("AdaHessian", _hutchinson),
    Method(
        "GGN-MC, BackPACK",
        _backpack_ggn_mc,
        fits=_is_chain,
        package=("backpack", "backpack-for-pytorch einops unfoldNd"),
    ),
    Method(
        "AdaHessian, pytorch_optimizer",
        _pytorch_optimizer_adahessian,
        package=("pytorch_optimizer", "pytorch_optimizer"),
    ),
    Method("exact GGN", functools.partial(_exact, "ggn"), fits=_ggn_is_feasible, exact=True),
    Method("exact H", functools.partial(_exact, "hessian"), fits=_hessian_is_feasible, exact=True),
)


COMPILED: tuple[Method, ...] = (
    *(method for method in METHODS if method.name in (UNIT, HARDEST, "AdaHesScale")),
    Method("Adam compiled", _compiled_first_order),
    Method("AdaHesScale compiled", _compiled_second_order),
    Method("plain pass", _pass),
    Method("plain pass compiled", functools.partial(_pass, backend="inductor")),
    Method("curvature pass", functools.partial(_pass, curvature=True)),
    Method("curvature pass compiled", functools.partial(_pass, curvature=True, backend="hesscale")),
)
"""What ``--compiled`` compares."""


def installed() -> tuple[Method, ...]:
    """The rows that can be measured here."""
    return tuple(method for method in METHODS if method.installed)


def left_out(methods: Sequence[Method] | None = None) -> str | None:
    """One line about the rows that cannot be measured, and what to install; None if there are none.

    Without dependencies, because BackPACK asks for torchvision, which may bring another torch.
    """
    absent = [method for method in methods or METHODS if not method.installed]
    packages = " ".join(method.package[1] for method in absent if method.package)
    names = " and ".join(f"“{method.name}”" for method in absent)
    return f"left out {names}: pip install --no-deps {packages}" if absent else None


@contextmanager
def known_warnings() -> Iterator[None]:
    """Silences what torch says about the other libraries in every step, and about its own compiler."""
    with warnings.catch_warnings():
        for message in (
            r"Using backward\(\) with create_graph=True",  # which pytorch_optimizer's AdaHessian asks for
            "Full backward hook is firing",  # BackPACK's hook on the first layer
            r"`torch\.jit\.script_method` is deprecated",  # on the first import of torch.compile's backend
        ):
            warnings.filterwarnings("ignore", message=message)
        yield
