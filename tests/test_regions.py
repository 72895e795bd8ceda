"""Element-wise expressions that part and meet again: exact as a whole, whatever their shape."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hesscale
from hesscale.graph import graph_of
from hesscale.regions import find_regions
from hesscale.rules import RULES, calculus
from hesscale.testing import exact_diagonal
from hesscale.wiring import wire

from .tensors import assert_close, leaf, random


def test_intermediate_tensors_inside_an_elementwise_region() -> None:
    x, g, s = leaf(6), random(6, seed=1), random(6, seed=2)
    gate = torch.sigmoid(x)
    at_gate, at_x = hesscale.diagonal(x * gate * gate, [gate, x], g, s)
    cut = gate.detach().requires_grad_()
    assert_close((at_gate,), hesscale.diagonal(x.detach() * cut.square(), cut, g, s))
    # asking for the gate does not cut x·σ²(x) apart
    assert_close((at_x,), hesscale.diagonal(x * torch.sigmoid(x).square(), x, g, s))


def test_the_gradient_is_a_number_in_nested_derivatives() -> None:
    """With create_graph=True g depends on x too; f'' is taken at a fixed g all the same."""
    x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    y = x * torch.sigmoid(x)
    with warnings.catch_warnings(action="ignore"):  # torch's, of a reference cycle
        hesscale.attach((y**3).sum()).backward(create_graph=True)
    assert_close(x.curvature, exact_diagonal(((x * torch.sigmoid(x)) ** 3).sum(), x)[0])
    x.grad = None


def test_the_output_of_an_expression_among_the_targets() -> None:
    x = leaf(3)
    h = x * torch.sigmoid(x)
    found = hesscale.diagonal(h.pow(3).sum(), (x, h))
    torch.testing.assert_close(found[1], 6 * h.detach())


def places_of_regions(y: Tensor) -> list[list[str]]:
    """The operations of each region, by name."""
    rows = graph_of(y).rows
    rules = [RULES.get(row[0]) for row in rows]
    regions = find_regions(wire(rows), rules, frozenset())
    return [[rows[place][0] for place in region.places] for region in regions.values()]


FOUND: dict[str, tuple[Callable[[Tensor], Tensor], list[list[str]]]] = {
    "a square": (lambda x: x * x, [["MulBackward0"]]),
    "a gate": (lambda x: x * torch.sigmoid(x), [["MulBackward0", "SigmoidBackward0"]]),
    "a chain": (lambda x: torch.sin(torch.exp(x)), []),
    "a sum of two": (lambda x: torch.sin(x) + torch.cos(x), [["AddBackward0", "CosBackward0", "SinBackward0"]]),
    "two in a row": (
        lambda x: (lambda y: y * torch.tanh(y))(x * x),
        [["MulBackward0", "TanhBackward0"], ["MulBackward0"]],
    ),
    "a gate between two": (
        lambda x: (lambda n, z, h: n + torch.sigmoid(z) * (h - n))(torch.tanh(x[0]), x[1], x[2]),
        [["AddBackward0", "MulBackward0", "SubBackward0"]],
    ),
    "a region behind a product": (
        lambda x: (lambda h, z: h * torch.tanh(h) * z)(x[0], x[1]),
        [["MulBackward0", "TanhBackward0"]],
    ),
    "a broadcast input": (lambda x: x * x.sum(0, keepdim=True), []),
    "a product with itself": (lambda x: x @ x.mT, []),
}


@pytest.mark.parametrize(("function", "expected"), FOUND.values(), ids=FOUND.keys())
def test_what_is_a_region(function: Callable[[Tensor], Tensor], expected: list[list[str]]) -> None:
    found = places_of_regions(function(leaf(3, 3)))
    assert [sorted(names) for names in found] == [sorted(names) for names in expected]


EXPRESSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cube": lambda x: x * x * x,
    "gelu written out": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3))),
    "a ratio": lambda x: x / (1 + x.abs()),
    "nested gates": lambda x: (x * torch.sigmoid(x)) * torch.tanh(x * torch.sigmoid(x)),
    "where": lambda x: torch.where(x > 0, x * x, x * torch.exp(x)),
    "a mask": lambda x: x.masked_fill(x > 0, 0.5) * x,
    "a loss of each element": lambda x: F.mse_loss(x, x.sin(), reduction="none"),
    "a likelihood of each element": lambda x: F.binary_cross_entropy_with_logits(x, x * x, reduction="none"),
    "softplus of a gate": lambda x: x * torch.tanh(F.softplus(x)),
}


@pytest.mark.parametrize("function", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())
@pytest.mark.parametrize("shape", [(5,), (2, 3), ()])
def test_expressions_are_exact(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    x = leaf(*shape)
    (found,) = hesscale.diagonal(function(x).pow(3).sum(), x)
    assert_close(found, exact_diagonal(function(x).pow(3).sum(), x)[0])


def test_an_expression_of_two_sources_is_exact_in_each() -> None:
    x, y = leaf(4), leaf(4, seed=1)

    def loss() -> Tensor:
        return (x * torch.sigmoid(x) * y + y * torch.tanh(y)).square().sum()

    assert_close(hesscale.diagonal(loss(), [x, y]), exact_diagonal(loss(), [x, y]))


def deep(depth: int, x: Tensor, w: Tensor) -> Tensor:
    """Regions with second derivatives in several sources, one of which is a leaf and all others are deep."""
    h = x
    for _ in range(depth):
        inner = h @ w
        h = x * torch.sigmoid(inner) + torch.tanh(inner) * torch.sigmoid(x)
    return h.square().sum()


def deep_slices(depth: int, x: Tensor, w: Tensor) -> Tensor:
    """In-place operations on slices, which a node hides."""
    h = x
    for _ in range(depth):
        h = h @ w
        h[:, :2].tanh_()
    return h.square().sum()


@pytest.mark.parametrize("call", ["backward", "diagonal"])
@pytest.mark.parametrize("deep", [deep, deep_slices])
def test_second_derivatives_visit_their_own_nodes(
    deep: Callable[[int, Tensor, Tensor], Tensor], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies behind them: no run of torch's engine prepares that, and no node of it is called or looked at."""
    called, seen, originals = [0], [0], (calculus.call, calculus._between)

    def counted_call(node: Any, grads: Any) -> Any:
        called[0] += 1
        return originals[0](node, grads)

    def counted_between(start: Any, end: Any, fixed: Any) -> Any:
        stops, stack = {*fixed, end[0]}, [start[0]]
        while stack:
            node = stack.pop()
            if node not in stops:
                seen[0] += 1
                stops.add(node)
                stack += [child for child, _ in node.next_functions if child is not None]
        return originals[1](start, end, fixed)

    monkeypatch.setattr(calculus, "call", counted_call)
    monkeypatch.setattr(calculus, "_between", counted_between)
    counts = []
    for depth in (4, 8, 12):
        x, w = leaf(3, 3), leaf(3, 3, seed=1)
        y = deep(depth, x, w)
        called[0] = seen[0] = 0
        if call == "backward":
            with monkeypatch.context() as only:
                only.setattr(torch.autograd, "grad", None)
                hesscale.backward(y)
        else:
            hesscale.diagonal(y, [x, w])
        counts.append((called[0], seen[0]))
    (first, second, third) = counts
    assert first[1] > 0
    assert [c - b for b, c in zip(second, third, strict=True)] == [b - a for a, b in zip(first, second, strict=True)]


def test_second_derivatives_are_those_of_torch_whatever_is_asked_for() -> None:
    """While only some inputs are asked for, nodes that are called by hand would leave out what leads to the others."""
    x, w, z = leaf(4, 4), leaf(4, 4, seed=1), leaf(4, 4, seed=2)
    h = x @ w
    y = h * torch.sigmoid(h * z) + z * torch.tanh(h)
    g, s = random(4, 4, seed=3), random(4, 4, seed=4)
    every = hesscale.diagonal(y, [x, w, z, h], g, s)
    y = (h := x @ w) * torch.sigmoid(h * z) + z * torch.tanh(h)
    hesscale.attach((g * y).sum() + (s * (y - y.detach()).square()).sum() / 2).backward()
    assert_close([x.curvature, w.curvature, z.curvature], [*every[:3]])
    for place, tensor in enumerate((x, w, z)):
        y = (h := x @ w) * torch.sigmoid(h * z) + z * torch.tanh(h)
        assert_close(hesscale.diagonal(y, tensor, g, s), every[place : place + 1])
    cut = h.detach().requires_grad_()
    y = cut * torch.sigmoid(cut * z) + z * torch.tanh(cut)
    offset = y - y.detach()
    exact = exact_diagonal((g * offset).sum() + (s * offset.square()).sum() / 2, (cut, z))
    assert_close((every[3], every[2]), exact)


def test_gauss_newton_keeps_the_residual_of_a_whole_loss() -> None:
    """A likelihood written out is one function, though its variance is a tensor that all else is a function of."""
    mean, raw, t = leaf(5), leaf(5, seed=1), random(5, seed=2)

    def loss() -> Tensor:
        variance = F.softplus(raw)
        return (variance.log() + (t - mean).square() / variance).sum()

    _, found = hesscale.diagonal(loss(), [mean, raw], method="hesscale_gn")
    assert_close(found, exact_diagonal(loss(), raw)[0])


def test_hooks_on_what_an_expression_reads_see_its_gradient_alone() -> None:
    """Also where one input was computed from another, as in a highway gate."""
    x, w = leaf(4, 4), leaf(4, 4, seed=1)

    def highway(h: Tensor) -> Tensor:
        n = h @ w
        return (h * torch.sigmoid(h) * n + n * torch.sigmoid(n) * h).square().sum()

    seen: list[Tensor] = []
    h = x.tanh()
    h.retain_grad()
    h.register_hook(seen.append)
    hesscale.backward(highway(h))
    cut = h.detach().requires_grad_()
    (expected,) = torch.autograd.grad(highway(cut), cut)
    assert len(seen) == 1
    assert_close([seen[0], h.grad], [expected, expected])
