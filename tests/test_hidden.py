"""Graphs with a part that nobody sees: every method says so, where each would find zeros for what is used in there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hesscale
from hesscale.applications.consolidation import EWC
from hesscale.applications.laplace import laplace
from hesscale.applications.over_batches import derivatives_over
from hesscale.estimators import ESTIMATORS
from hesscale.optim.sources import hutchinson_backward, sampled_gauss_newton_backward
from hesscale.testing import exact_diagonal

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of nested ones

Part = Callable[[Tensor], Tensor]


class Recomputed(torch.autograd.Function):
    """A reentrant checkpoint of somebody's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(x)
        return part(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.part(x).backward(grad)
        return x.grad, None


class Delegating(torch.autograd.Function):
    """Hides nothing: its backward is another Function's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Cosine.backward(ctx, grad)


class Cosine(torch.autograd.Function):
    """What Delegating delegates to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        raise AssertionError("nobody calls it")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def reentrant(part: Part, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=True)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Three layers, some of them within ``hidden``; the first one's input may require grad, as embeddings do."""

    def __init__(self, *, first: bool = False, middle: bool = False, nested: bool = False, by: Any = reentrant) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.first, self.middle, self.nested, self.by = first, middle, nested, by

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(self.first)
        if self.nested:
            return self.c(self.by(lambda t: self.by(self.b, self.a(t).tanh()).tanh(), x))  # type: ignore[no-any-return]
        h = (self.by(self.a, x) if self.first else self.a(x)).tanh()
        return self.c((self.by(self.b, h) if self.middle else self.b(h)).tanh())  # type: ignore[no-any-return]


NETS: dict[str, dict[str, Any]] = {
    "a leaf goes in": {"first": True},
    "something computed goes in": {"middle": True},
    "both": {"first": True, "middle": True},
    "nested": {"first": True, "nested": True},
    "somebody's own": {"first": True, "by": lambda part, x: Recomputed.apply(x, part)},
}

X, Y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0, 1])
BATCHES = [(X, Y)]


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), Y)


def head_alone(method: str, model: Net) -> Any:
    generator = torch.Generator().manual_seed(0)
    return hesscale.estimate(method, model, F.cross_entropy, (X, Y), params=["c.weight"], generator=generator)


@pytest.mark.parametrize("net", NETS.values(), ids=NETS.keys())
@pytest.mark.parametrize("method", ESTIMATORS)
def test_no_estimator_takes_it_for_unused(method: str, net: dict[str, Any]) -> None:
    with pytest.raises(hesscale.MissingRuleError, match=r"use_reentrant=False"):
        hesscale.estimate(method, Net(**net), F.cross_entropy, (X, Y), generator=torch.Generator().manual_seed(0))


WAYS: dict[str, Callable[[Net], Any]] = {
    "backward": lambda model: hesscale.backward(loss_of(model)),
    "backward to inputs": lambda model: hesscale.backward(loss_of(model), inputs=[*model.parameters()]),
    "attach": lambda model: hesscale.attach(loss_of(model)).backward(),
    "diagonal": lambda model: hesscale.diagonal(loss_of(model), model),
    "missing": lambda model: hesscale.diagonal(loss_of(model), model, missing="exact"),
    "rank": lambda model: hesscale.diagonal(loss_of(model), model, rank=1),
    "exact_diagonal": lambda model: exact_diagonal(loss_of(model), [*model.parameters()]),
    "compare_with_exact": lambda model: hesscale.testing.compare_with_exact(model, F.cross_entropy, (X, Y)),
    "Hutchinson's source": lambda model: hutchinson_backward(loss_of(model), [*model.parameters()]),
    "the sampled source": lambda model: sampled_gauss_newton_backward(loss_of(model), [*model.parameters()]),
    "AdaHesScale": lambda model: hesscale.AdaHesScale(model.parameters()).backward(loss_of(model)),
    "EWC": lambda model: EWC(model).consolidate(F.cross_entropy, BATCHES),
    "Laplace": lambda model: laplace(model, F.cross_entropy, BATCHES),
    "Laplace of squared gradients": lambda model: laplace(model, F.cross_entropy, BATCHES, method="squared_gradient"),
    "gradients": lambda model: derivatives_over(
        model, F.cross_entropy, BATCHES, diagonal=dict(model.named_parameters())
    ),
    # the weight that is wanted is in sight; it might be used out of sight, too
    "the head by HesScale": lambda model: head_alone("hesscale", model),
    "the head by squared gradients": lambda model: head_alone("squared_gradient", model),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_no_way_takes_it_for_unused(way: Callable[[Net], Any]) -> None:
    model = Net(first=True)
    with pytest.raises(hesscale.MissingRuleError, match=r"CheckpointFunctionBackward \(x1\).*use_reentrant=False"):
        way(model)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("method", ESTIMATORS)
def test_without_such_a_part_what_is_not_reached_is_unused(method: str) -> None:
    class Cut(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.b(self.a(x).tanh()).tanh()
            return self.c(Delegating.apply(h) + self.c.weight.mean() * 0)  # type: ignore[no-any-return]

    model = Cut()
    params = ["b.weight", "c.bias"] if method == "kfac" else None
    generator = torch.Generator().manual_seed(0)
    found = hesscale.estimate(method, model, F.cross_entropy, (X, Y), params=params, generator=generator)
    assert not found["b.weight"].any()
    assert found["c.bias"].all()


def test_delegating_hides_nothing() -> None:
    x = torch.linspace(0.1, 1, 5, dtype=torch.float64, requires_grad=True)
    (found,) = hesscale.diagonal(Delegating.apply(x).sum(), x, missing="exact")
    torch.testing.assert_close(found, -x.detach().sin(), rtol=1e-10, atol=1e-10)
    assert not hesscale.check(Delegating.apply(x).sum()).exact.get("DelegatingBackward")


def test_a_rule_does_not_show_what_is_hidden() -> None:
    model = Net(**NETS["somebody's own"])
    with hesscale.rules.registered(hesscale.Selection(), Recomputed):
        with pytest.raises(hesscale.MissingRuleError, match=r"RecomputedBackward \(x1\).*backward pass of its own"):
            hesscale.backward(loss_of(model))
        assert hesscale.check(loss_of(model)).missing == {"RecomputedBackward": 1}
