"""autograd.Functions whose arguments are not all tensors, and whose outputs are not all differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale import Bilinear, Coupled, Elementwise, Selection
from hesscale.estimators import ESTIMATORS
from hesscale.rules import registered
from hesscale.rules.families import Rule
from hesscale.testing import exact_diagonal

from .case import constant, randn


class Reverse(torch.autograd.Function):
    """Gradient reversal: the identity, and on the way back a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.factor * grad, None


class Power(torch.autograd.Function):
    """x^p, its variable the last of all that a Function may be given, and its value the last of all it may return."""

    @staticmethod
    def forward(ctx: Any, parts: list[Tensor], p: int, none: None, places: Tensor, x: Tensor) -> tuple[Any, ...]:
        ctx.p = p
        ctx.save_for_backward(x)
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        return order, "no tensor", x**p

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return None, None, None, None, ctx.p * x ** (ctx.p - 1) * grads[2], None, None  # torch allows too many


def reverse(x: Tensor) -> Tensor:
    return Reverse.apply(x, 0.5)  # type: ignore[no-any-return]


def power(x: Tensor) -> Tensor:
    return Power.apply([x], 3, None, torch.arange(4), x)[2]  # type: ignore[no-any-return]


def reversing(x: Tensor) -> Tensor:
    """The same in torch's own operations."""
    return -0.5 * x + 1.5 * x.detach()


def power_slopes(node: Any) -> Any:
    (x,) = node.saved_tensors
    return node.p * x ** (node.p - 1), node.p * (node.p - 1) * x ** (node.p - 2)


def power_ratio(node: Any) -> Any:
    return 0, node.p - 1, 1 / node.saved_tensors[0]  # f''/f'


def power_coupled(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    first, second = power_slopes(node)
    return (0 if s is None else first**2 * s) + (0 if g is None else second * g)  # type: ignore[no-any-return]


class Scaled(Rule):
    """A rule written from nothing."""

    def __call__(self, node: Any, s: Any, g: Any, wanted: Any) -> Any:
        return [None if entry is None else node.factor**2 * entry for entry in s]

    def is_linear(self, wanted: Any) -> bool:
        return True


OF_REVERSE: dict[str, Rule] = {
    "Selection": Selection(scaled=True),
    "Elementwise": Elementwise(),
    "Elementwise, one pair": Elementwise(lambda node: (-node.factor, None)),
    "Elementwise, one pair per input": Elementwise(lambda node: ((-node.factor, None),)),
    "Bilinear": Bilinear(lambda node, s, wanted: (node.factor**2 * s,), ()),
    "Coupled": Coupled(lambda node, s, g: None if s is None else node.factor**2 * s, linear=True),
    "Coupled, a tuple": Coupled(lambda node, s, g: (None if s is None else node.factor**2 * s,), linear=True),
    "own": Scaled(),
}
OF_POWER: dict[str, Rule] = {
    "Elementwise": Elementwise(power_slopes),
    "Elementwise, one pair per tensor": Elementwise(lambda node: ((None, None), power_slopes(node))),
    "Elementwise, f' by torch": Elementwise(lambda node: (None, power_slopes(node)[1])),
    "Elementwise, by parts": Elementwise(power_slopes, by_parts=True),
    "Elementwise, ratio": Elementwise(ratio=power_ratio),
    "Coupled": Coupled(power_coupled),
    "Coupled, one per tensor": Coupled(lambda node, s, g: (None, power_coupled(node, s, g))),
    "Coupled, of all outputs": Coupled(lambda node, s, g: (None, power_coupled(node, s[2], g[2])), outputs=3),
}


@pytest.mark.parametrize("missing", ["exact", "sample"])
def test_autograd_takes_them(missing: Any) -> None:
    for function, plain in ((reverse, reversing), (power, lambda x: x**3)):
        x = randn(4)
        generator = torch.Generator().manual_seed(0)
        found = hesscale.diagonal(function(x).square().sum(), x, missing=missing, generator=generator)
        expected = hesscale.diagonal(plain(x).square().sum(), x)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("key", [Reverse, "ReverseBackward"], ids=["class", "name"])
@pytest.mark.parametrize("rule", OF_REVERSE.values(), ids=OF_REVERSE.keys())
def test_every_family_takes_a_number(rule: Rule, key: Any) -> None:
    x = randn(3, 4)
    with registered(rule, key):
        found = hesscale.diagonal(reverse(x).pow(3).sum(), x)
    torch.testing.assert_close(found, hesscale.diagonal(reversing(x).pow(3).sum(), x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("key", [Power, "PowerBackward"], ids=["class", "name"])
@pytest.mark.parametrize("rule", OF_POWER.values(), ids=OF_POWER.keys())
def test_every_family_takes_what_is_no_variable(rule: Rule, key: Any) -> None:
    x = randn(4)
    with registered(rule, key):
        found = hesscale.diagonal(power(x).square().sum(), x)
    torch.testing.assert_close(found, hesscale.diagonal((x**3).square().sum(), x), rtol=1e-10, atol=1e-10)


def test_a_selection_among_all_kinds_of_arguments() -> None:
    class Pick(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, axis: int, places: Tensor, x: Tensor, keep: None, y: Tensor) -> Any:
            ctx.axis, ctx.size = axis, x.shape[axis]
            ctx.save_for_backward(places)
            return places + 1, x.index_select(axis, places), y.flip(axis)

        @staticmethod
        def backward(ctx: Any, _: Any, grad: Tensor, flipped: Tensor) -> Any:
            (places,) = ctx.saved_tensors
            x = grad.new_zeros(ctx.size).index_add(ctx.axis, places, grad)
            return None, None, x, None, flipped.flip(ctx.axis)

    x, y = randn(5), randn(4, seed=1)
    with registered(Selection(), Pick):
        _, a, b = Pick.apply(0, torch.tensor([3, 0, 3]), x, None, y)
        found = hesscale.diagonal(a.pow(3).sum() + b.pow(4).sum(), (x, y))
    expected = exact_diagonal(x[[3, 0, 3]].pow(3).sum() + y.flip(0).pow(4).sum(), (x, y))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_within_an_expression_that_meets_again() -> None:
    x = randn(4)
    with registered(Elementwise(lambda node: (-node.factor, None), linear=((0,),)), Reverse):
        found = hesscale.diagonal((reverse(x) * x.sin()).sum(), x)
    torch.testing.assert_close(found, exact_diagonal((reversing(x) * x.sin()).sum(), x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("expression", [lambda y, x: y * x, lambda y, x: y * y.sin() * x, lambda y, x: y + x * x])
def test_a_function_of_several_outputs_within_such_an_expression(expression: Any) -> None:
    """By its rule or node by node, but not as if its first output were the one that is read."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.p = 3
            ctx.save_for_backward(x)
            return x.clone(), x**3

        @staticmethod
        def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
            return first + 3 * ctx.saved_tensors[0] ** 2 * second

    x = randn(4)
    with registered(Elementwise(power_slopes), Cube):
        found = hesscale.diagonal(expression(Cube.apply(x)[1], x).sum(), x)
        alone = hesscale.diagonal(expression(Cube.apply(x)[1], constant(x)).sum(), x)
    with registered(Elementwise(power_slopes, pointwise=False), Cube):
        expected = hesscale.diagonal(expression(Cube.apply(x)[1], x).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    exact = exact_diagonal(expression(x**3, constant(x)).sum(), x)
    torch.testing.assert_close(alone, exact, rtol=1e-10, atol=1e-10)


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ESTIMATORS)
def test_every_estimator_takes_a_number(method: str) -> None:
    batch = constant(randn(5, 3)), torch.tensor([0, 1, 1, 0, 1])
    with registered(Elementwise(lambda node: (-node.factor, None), linear=((0,),)), Reverse):
        found, expected = (
            hesscale.estimate(method, Net(between), F.cross_entropy, batch, generator=torch.Generator().manual_seed(1))
            for between in (reverse, reversing)
        )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("key", [Reverse, "ReverseBackward"], ids=["class", "name"])
def test_examples_stay_apart_behind_either_key(key: Any) -> None:
    """In the network and in the loss, by columns and by draws."""
    x, y = constant(randn(5, 3)), torch.tensor([0, 1, 1, 0, 1])
    with registered(Elementwise(lambda node: (-node.factor, None), linear=((0,),)), key):
        loss = reverse(F.cross_entropy(Net(reverse)(x), y))
        columns = hesscale.check(loss, rank=1).columns
        assert columns is not None and not columns.mixed
        found, expected = (
            hesscale.estimate("ggn_mc", Net(reverse), fn, (x, y), generator=torch.Generator().manual_seed(1))
            for fn in (lambda *of: Reverse.apply(F.cross_entropy(*of), -2.0), lambda *of: 2 * F.cross_entropy(*of))
        )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "rule", [Elementwise(lambda node: ((1.0, None), (1.0, None))), Coupled(lambda node, s, g: (s, None))]
)
def test_entries_for_what_is_no_tensor_are_refused(rule: Rule) -> None:
    x = randn(4)
    with registered(rule, Reverse), pytest.raises(ValueError, match=r"2 entries for 1 inputs.*none for numbers"):
        hesscale.backward(reverse(x).square().sum())
    assert x.grad is None


def test_a_rule_of_one_output_does_not_drop_another() -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x.clone(), x.clone()

        @staticmethod
        def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
            return first + second

    x = randn(4)
    with registered(Elementwise(), Both):
        first, second = Both.apply(x)
        with pytest.raises(NotImplementedError, match="depends on 2 outputs of BothBackward"):
            hesscale.backward((first + second**2).sum())
        (found,) = hesscale.diagonal(Both.apply(x)[1].pow(2).sum(), x)
    torch.testing.assert_close(found, torch.full_like(x, 2.0), rtol=0, atol=0)
