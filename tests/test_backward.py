"""What ``hesscale.backward`` and ``hesscale.diagonal`` promise beside the numbers: when, where and how often."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.plan import METHODS, Method
from hesscale.rules.families import Curvatures, Rule
from hesscale.rules.table import RULES, RuleTable

from .tensors import assert_close, bowl, leaf, random


def test_retain_graph_allows_a_second_pass_over_the_same_graph() -> None:
    w = leaf(2, 3)
    loss = bowl(w)
    hesscale.backward(loss, retain_graph=True)
    once = w.curvature.clone()
    hesscale.backward(loss)
    assert_close(w.curvature, 2 * once)


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("with_curvature", [False, True])
def test_seeds_stand_for_what_follows(scalar: bool, with_curvature: bool) -> None:
    x = leaf() if scalar else leaf(4)
    g = None if scalar else random(4, seed=1)
    s = random(*x.shape, seed=2) if with_curvature else None
    y = torch.tanh(x)
    hesscale.backward(y, g, s)
    t, g = y.detach(), torch.ones_like(y) if g is None else g
    first, second = 1 - t * t, -2 * t * (1 - t * t)
    assert_close(x.grad, first * g)
    assert_close(x.curvature, first.square() * (0 if s is None else s) + second * g)


@pytest.mark.parametrize("s", [None, 3.0])
def test_a_leaf_may_be_the_loss(s: float | None) -> None:
    x = leaf()
    seed = None if s is None else torch.tensor(s, dtype=torch.float64)
    assert hesscale.diagonal(x, x, curvature=seed) == (torch.tensor(s or 0.0, dtype=torch.float64),)
    assert x.grad is None and not hasattr(x, "curvature")
    hesscale.backward(x, curvature=seed)
    assert x.grad == 1 and x.curvature == (s or 0.0)


def test_the_start_may_be_among_the_inputs() -> None:
    x, g, s = leaf(4), random(4, seed=1), random(4, seed=2)
    y = torch.sin(x)
    at_y, at_x = hesscale.diagonal(y, [y, x], g, s, retain_graph=True)
    assert_close(at_y, s)
    assert_close(at_x, torch.cos(x.detach()).square() * s - torch.sin(x.detach()) * g)
    assert_close(hesscale.diagonal(y, y, g, s, retain_graph=True), (s,))
    assert_close(hesscale.diagonal(y, y, g), (torch.zeros_like(s),))


def test_frozen_and_unused_parameters() -> None:
    used, unused, frozen = leaf(2, 3), leaf(5), nn.Parameter(random(2, 2, seed=1), requires_grad=False)
    loss = F.mse_loss(torch.tanh(F.linear(random(4, 3), used)) @ frozen, random(4, 2, seed=3))
    found = hesscale.diagonal(loss, [used, unused], retain_graph=True)
    hesscale.backward(loss)
    assert_close((used.curvature, None), found)
    assert not any(hasattr(p, "curvature") or p.grad is not None for p in (unused, frozen))


def test_shared_weights_add_what_their_copies_would_get() -> None:
    x, y = random(5, 3), random(5, 3, seed=1)

    def loss(first: Tensor, second: Tensor) -> Tensor:
        return F.mse_loss(F.linear(torch.tanh(F.linear(x, first)), second), y)

    shared, copies = leaf(3, 3, seed=2), [leaf(3, 3, seed=2), leaf(3, 3, seed=2)]
    hesscale.backward(loss(shared, shared))
    assert_close((shared.curvature,), (sum(hesscale.diagonal(loss(*copies), copies)),))


def test_intermediate_tensors_have_a_curvature_too() -> None:
    x, w, v, y = random(5, 3), leaf(4, 3), leaf(2, 4, seed=1), random(5, 2, seed=2)
    hidden = torch.tanh(F.linear(x, w))
    at_hidden, at_w = hesscale.diagonal(F.mse_loss(F.linear(hidden, v), y), [hidden, w], retain_graph=True)
    cut = hidden.detach().requires_grad_()
    assert_close((at_hidden,), hesscale.diagonal(F.mse_loss(F.linear(cut, v), y), cut))
    assert_close((at_w,), hesscale.diagonal(F.mse_loss(F.linear(hidden, v), y), w))


def test_diagonal_returns_a_tuple_and_touches_nothing() -> None:
    x = leaf(3)
    for inputs in (x, [x], (x,)):
        assert_close(hesscale.diagonal(torch.sin(x).sum(), inputs), (-torch.sin(x.detach()),))
    assert x.grad is None and not hasattr(x, "curvature")


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("autocast", [False, True])
def test_curvature_has_the_dtype_of_its_parameter(autocast: bool, method: str) -> None:
    w, x = leaf(2, 3, dtype=torch.float32), random(5, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = torch.tanh(F.linear(x, w) * 0.7) / 3
        loss = F.cross_entropy(output, torch.tensor([0, 1, 1, 0, 1])) / 3 * 0.7 + 0.1 / output.square().mean()
    assert hesscale.diagonal(loss, w, method=method, retain_graph=True)[0].dtype == torch.float32
    hesscale.backward(loss, method=method)
    assert w.curvature.dtype == w.grad.dtype == torch.float32


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: random(4, 2, 3, 3),
    "permuted": lambda: random(3, 3, 2, 4).permute(3, 2, 0, 1),
    "channels last": lambda: random(4, 2, 3, 3).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda: random(4, 2, 3, 6)[..., ::2],
    "expanded": lambda: random(1, 2, 3, 3).expand(4, 2, 3, 3),
}


@pytest.mark.parametrize("build", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "use",
    [lambda w: F.conv2d(random(1, 2, 5, 5), w), lambda w: F.linear(random(1, 18), w.flatten(1)), torch.sin],
    ids=["conv", "linear", "sin"],
)
def test_any_memory_layout(build: Callable[[], Tensor], use: Callable[[Tensor], Tensor]) -> None:
    w, plain = build().requires_grad_(), build().contiguous().requires_grad_()
    hesscale.backward(use(w).square().sum())
    hesscale.backward(use(plain).square().sum())
    assert_close(w.curvature, plain.curvature)
    assert w.curvature.stride() == w.grad.stride()
    assert_close(hesscale.diagonal(use(w).square().sum(), w), (plain.curvature,))


SHARING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "views": lambda a, b: a.view(2, 3).view(6) + b.view(3, 2).view(6),
    "joined": lambda a, b: torch.stack([a, b]).sum(0),
    "repeated": lambda a, b: a + b + a,
    "expanded": lambda a, b: a.expand(1, 6).view(6) + b[0].expand(6),
}


@pytest.mark.parametrize("function", SHARING.values(), ids=SHARING)
def test_every_curvature_has_memory_of_its_own(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    a, b, g, s = leaf(6), leaf(6, seed=1), leaf(6, seed=2), leaf(6, seed=3)
    hesscale.backward(function(a, b), g, s)
    ours: list[Any] = [a.curvature, b.curvature, *hesscale.diagonal(function(a, b), [a, b, a], g, s)]
    theirs: list[Any] = [a.grad, b.grad, a, b, g, s]  # torch lets gradients share memory with each other and with g
    addresses = [tensor.untyped_storage().data_ptr() for tensor in ours]
    assert len(set(addresses)) == len(ours)
    assert not set(addresses) & {tensor.untyped_storage().data_ptr() for tensor in theirs}
    assert not any(tensor.requires_grad for tensor in ours)


@dataclass(frozen=True)
class Spy(Rule):
    """A rule that notes each call: the node's name, and whether g was handed over."""

    rule: Rule
    calls: Counter[tuple[str, bool]]

    @property
    def pointwise(self) -> bool:
        return self.rule.pointwise

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        self.calls[node.name(), g[0] is not None] += 1
        return self.rule(node, s, g, wanted)

    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        return self.rule.is_linear(wanted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """Counts the calls of every rule of the methods ``spied`` and ``spied_gn``."""
    counter: Counter[tuple[str, bool]] = Counter()
    table = RuleTable({name: Spy(rule, counter) for name, rule in RULES.items()})
    monkeypatch.setitem(METHODS, "spied", Method(table))
    monkeypatch.setitem(METHODS, "spied_gn", Method(table, gauss_newton=True))
    return counter


def residual_network(depth: int) -> Tensor:
    hidden = random(4, 3)
    for seed in range(depth):
        hidden = hidden + torch.tanh(F.linear(hidden, leaf(3, 3, seed=seed)))
    return F.mse_loss(hidden, random(4, 3, seed=1))


def nodes_of(node: Any, found: set[Any]) -> set[Any]:
    if node is not None and node not in found:
        found.add(node)
        for child, _ in node.next_functions:
            nodes_of(child, found)
    return found


def test_every_rule_runs_once_per_node_whatever_the_fan_out(calls: Counter[tuple[str, bool]]) -> None:
    visits = []
    for depth in (4, 8, 16, 32):
        loss = residual_network(depth)
        calls.clear()
        hesscale.backward(loss, method="spied", retain_graph=True)
        nodes = Counter(node.name() for node in nodes_of(loss.grad_fn, set()) if node.name() in RULES)
        assert calls == {(name, True): count for name, count in nodes.items()}
        visits.append(calls.total())
    assert visits[3] - visits[2] == 2 * (visits[2] - visits[1]) == 4 * (visits[1] - visits[0])


@pytest.mark.parametrize("named", [False, True])
def test_a_softmax_inside_attention_is_not_the_loss(calls: Counter[tuple[str, bool]], named: bool) -> None:
    x, w, y = random(2, 4, 3), leaf(3, 3), torch.tensor([[0, 1, 2, 1], [2, 2, 0, 1]])
    output = torch.softmax(F.linear(x, w) @ x.mT, -1) @ F.linear(x, w)  # [2, 4, 3]
    loss = F.cross_entropy(output.flatten(0, 1), y.flatten())
    hesscale.backward(loss, method="spied_gn", output=output if named else None)
    assert calls["SoftmaxBackward0", False] == 1 and calls["SoftmaxBackward0", True] == 0
    assert calls["LogSoftmaxBackward0", True] == 1 and calls["LogSoftmaxBackward0", False] == 0
    assert w.curvature.min() >= 0  # a sum of squares


def test_a_seed_may_require_grad() -> None:
    x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    y = x * torch.sigmoid(x)
    (found,) = hesscale.diagonal(y, x, gradient=x, curvature=x, retain_graph=True)
    (plain,) = hesscale.diagonal(y, x, gradient=x.detach(), curvature=x.detach())
    assert_close(found, plain)
    assert not found.requires_grad

    def write(x: Tensor) -> Tensor:
        base = torch.zeros(4, dtype=torch.float64)
        base[1:3] = x.sin()
        return base

    (found,) = hesscale.diagonal(write(x), x, gradient=torch.cat([x, x]))
    (plain,) = hesscale.diagonal(write(x), x, gradient=torch.cat([x, x]).detach())
    assert_close(found, plain)


@pytest.mark.parametrize("passes", [1, 2])
def test_backward_to_some_inputs(passes: int) -> None:
    w, v = leaf(2, 3), leaf(2, 3, seed=1)
    hidden = torch.tanh(w) * v
    loss = hidden.sin().sum()
    expected = hesscale.diagonal(loss, [w, hidden], retain_graph=True)
    for _ in range(passes):
        hesscale.backward(loss, inputs=[w, hidden], retain_graph=True)
    assert_close([w.curvature, hidden.curvature], [passes * s for s in expected])
    assert_close([w.grad, hidden.grad], [passes * g for g in torch.autograd.grad(loss, [w, hidden])])
    assert v.grad is None and not hasattr(v, "curvature")


def test_diagonals_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[2].bias.requires_grad_(False)
    loss = model(random(5, 3)).square().mean()
    expected = hesscale.diagonal(loss, [p for p in model.parameters() if p.requires_grad], retain_graph=True)
    found = hesscale.diagonal(loss, model, retain_graph=True)
    assert [*found] == ["0.weight", "0.bias", "2.weight"]
    assert_close([*found.values()], [*expected])
    assert_close(hesscale.diagonal(loss, {"bias": model[0].bias}), {"bias": expected[1]})


def test_transforms_of_torch_func_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.func transforms"):
        torch.func.grad(lambda w: hesscale.diagonal(w.sin().pow(3).sum(), w)[0].sum())(torch.ones(3))


def test_an_input_that_is_named_twice_counts_once() -> None:
    w = leaf(2, 3)
    hesscale.backward(bowl(w), inputs=[w, w])
    assert_close(w.curvature, hesscale.diagonal(bowl(w), w)[0])
