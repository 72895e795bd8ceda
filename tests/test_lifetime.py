"""Nothing outlives its pass: no graph, no model, no hook, no tensor, however a pass ends."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.plan import METHODS, Method
from hesscale.rules.table import RULES

PASSES = 100


class Brittle(torch.autograd.Function):
    """The identity, with a curvature rule that raises or a backward that does."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Brittle.fails:
            raise ArithmeticError("this gradient fails")
        return grad


class Network(nn.Module):
    """Two layers, a region (x·σ(x)), and room for an operation in the middle."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), middle

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x))
        return self.last(hidden * torch.sigmoid(hidden))


def loss_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    output = model(torch.ones(5, 3, dtype=torch.float64))
    return F.cross_entropy(output, torch.tensor([0, 1, 1, 0, 1])), output


def by_backward(loss: Tensor, model: Network) -> None:
    hesscale.backward(loss)


def by_backward_retained(loss: Tensor, model: Network) -> None:
    hesscale.backward(loss, retain_graph=True)


def by_attach(loss: Tensor, model: Network) -> None:
    hesscale.attach(loss).backward()


def by_attach_retained(loss: Tensor, model: Network) -> None:
    hesscale.attach(loss).backward(retain_graph=True)


def by_attach_never_run(loss: Tensor, model: Network) -> None:
    hesscale.attach(loss)


def by_attach_below(loss: Tensor, model: Network) -> None:
    (3 * hesscale.attach(loss)).backward()


def by_attach_functional(loss: Tensor, model: Network) -> None:
    torch.autograd.grad(hesscale.attach(loss), list(model.parameters()))


def by_diagonal(loss: Tensor, model: Network) -> None:
    hesscale.diagonal(loss, list(model.parameters()))


def by_two_losses(loss: Tensor, model: Network) -> None:
    with pytest.raises(RuntimeError, match="two attached losses"):
        (hesscale.attach(loss) + hesscale.attach(loss_of(model)[0])).backward()


def by_missing_rule(loss: Tensor, model: Network) -> None:
    with pytest.raises(hesscale.MissingRuleError):
        hesscale.backward(Brittle.apply(loss))


def by_failing_rule(loss: Tensor, model: Network) -> None:
    model.middle = Brittle.apply
    for run in (hesscale.backward, lambda *_, method: hesscale.attach(loss_of(model)[0], method=method).backward()):
        with pytest.raises(ArithmeticError, match="rule"):
            run(loss_of(model)[0], method="brittle rule")


def by_failing_gradient(loss: Tensor, model: Network) -> None:
    model.middle, Brittle.fails = Brittle.apply, True
    for run in (hesscale.backward, lambda *_, method: hesscale.attach(loss_of(model)[0], method=method).backward()):
        with pytest.raises(ArithmeticError, match="gradient"):
            run(loss_of(model)[0], method="brittle gradient")


PASSES_BY_NAME = [
    by_backward,
    by_backward_retained,
    by_attach,
    by_attach_retained,
    by_attach_never_run,
    by_attach_below,
    by_attach_functional,
    by_diagonal,
    by_two_losses,
    by_missing_rule,
    by_failing_rule,
    by_failing_gradient,
]
Pass = Callable[[Tensor, Network], None]


def failing_rule(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor:
    raise ArithmeticError("this rule fails")


@pytest.fixture(autouse=True)
def brittle_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rule in {"brittle rule": failing_rule, "brittle gradient": lambda node, s, g: s}.items():
        monkeypatch.setitem(METHODS, name, Method(RULES.overlay({"BrittleBackward": hesscale.Coupled(rule)})))
    monkeypatch.setattr(Brittle, "fails", False)


def hooks_on(node: Any) -> int:
    """How many pre-hooks a node has: the handle of one more leads to the dict of all."""
    handle = node.register_prehook(lambda grads: None)
    number = len(handle.hooks_dict_ref()) - 1
    handle.remove()
    return number


def living_tensors() -> int:
    gc.collect()
    return sum(type(thing) in (Tensor, nn.Parameter) for thing in gc.get_objects())


@pytest.mark.parametrize("run", PASSES_BY_NAME, ids=lambda run: run.__name__)
def test_graph_and_model_die_when_their_owner_drops_them(run: Pass) -> None:
    model = Network()
    loss, output = loss_of(model)
    watched = [weakref.ref(thing) for thing in (model, loss, output, *model.parameters())]
    run(loss, model)
    del model, loss, output
    gc.collect()
    assert [thing() for thing in watched] == [None] * len(watched)


@pytest.mark.parametrize("run", PASSES_BY_NAME, ids=lambda run: run.__name__)
def test_a_hundred_passes_leave_as_much_as_one(run: Pass) -> None:
    model = Network()
    # somebody else may hold on to the nodes that accumulate gradients, as DistributedDataParallel does
    leaves = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in model.parameters()]
    for _ in range(2):  # gradients count from the second pass on, when Python first sees them
        run(loss_of(model)[0], model)
    tensors = living_tensors()
    for _ in range(PASSES):
        run(loss_of(model)[0], model)
    assert living_tensors() == tensors
    assert [hooks_on(node) for node in leaves] == [0] * len(leaves)


@pytest.mark.parametrize(
    "run", [by_backward, by_backward_retained, by_attach, by_attach_retained, by_attach_never_run, by_diagonal]
)
def test_a_graph_is_freed_without_the_collector(run: Pass) -> None:
    model = Network()
    loss, output = loss_of(model)
    watched = weakref.ref(loss), weakref.ref(output)
    gc.collect()
    gc.disable()
    try:
        run(loss, model)
        del loss, output
        assert watched[0]() is None and watched[1]() is None
    finally:
        gc.enable()
