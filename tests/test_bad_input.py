"""Everything that can be wrong with a call: one table of mistakes, each with the error that explains it."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hesscale
from hesscale.rules.table import RULES, RuleTable


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Unknown(torch.autograd.Function):
    """An operation nobody has a rule for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Foreign(Unknown):
    """Another one."""


DATA = random(5, 3)


def bowl(w: Tensor) -> Tensor:
    return torch.sin(F.linear(DATA, w)).square().sum()


def used_up(w: Tensor) -> Tensor:
    loss = bowl(w)
    torch.autograd.grad(loss, w)
    return loss


def trunk_used_up(w: Tensor) -> Tensor:
    """A loss of its own, on a trunk that another loss has freed."""
    trunk = torch.sin(F.linear(random(5, 3), w))
    torch.autograd.grad(trunk.exp().sum(), w)
    return trunk.square().sum()


def compiled(w: Tensor) -> Tensor:
    # the graph is not run backward in the end, and tracing mode does not matter to what its node is called
    return torch.compile(bowl, backend="aot_eager")(w)


def _expression(w: Tensor) -> Tensor:
    return (w.sin() * w).tanh().sum()


def scripted(w: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch wants no new code to script anything
        function = torch.jit.script(_expression)
    for _ in range(3):  # it is recorded as it stands until it has been optimized
        loss: Tensor = function(w)
    return loss


def chunked_cross_entropy(w: Tensor) -> Tensor:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    inputs, targets = w.new_ones(4096, 3), torch.zeros(4096, dtype=torch.long)
    options = LinearCrossEntropyOptions(batch_chunk_size=512)
    return F.linear_cross_entropy(inputs, w.repeat(1000, 1), targets, options=options)


@dataclass(frozen=True)
class Mistake:
    """Makes something of w and calls the library with it, wrongly."""

    loss: Callable[[Tensor], Any]
    call: Callable[[Any, Tensor], Any]
    error: type[Exception]
    message: str


def backward(loss: Any, w: Tensor) -> None:
    hesscale.backward(loss, retain_graph=True)


def diagonal(loss: Any, w: Tensor) -> None:
    hesscale.diagonal(loss, w, retain_graph=True)


def attach(loss: Any, w: Tensor) -> None:
    hesscale.attach(loss)


ZERO = torch.zeros((), dtype=torch.float64)
PAIR = torch.zeros(2, dtype=torch.float64)
MISSING = hesscale.MissingRuleError

BAD_LOSSES: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "unknown operation": (
        lambda w: Unknown.apply(w).sum(),
        MISSING,
        r"UnknownBackward \(x1\).*Nothing was changed.*register",
    ),
    "unknown operations": (
        lambda w: Unknown.apply(Foreign.apply(Unknown.apply(bowl(w)))),
        MISSING,
        r"for: ForeignBackward \(x1\), UnknownBackward \(x2\)\.",
    ),
    "compiled region": (compiled, MISSING, r"CompiledFunctionBackward.*force_eager"),
    "no graph": (lambda w: ZERO, RuntimeError, "does not require grad"),
    "detached": (lambda w: bowl(w).detach(), RuntimeError, "detached"),
    "freed graph": (used_up, RuntimeError, "freed by an earlier backward.*retain_graph=True"),
    "freed trunk": (trunk_used_up, RuntimeError, "freed by an earlier backward.*retain_graph=True"),
    "complex leaf": (
        lambda w: bowl((w * (1j + ZERO).requires_grad_()).abs()),
        MISSING,
        r"AbsBackward0 \(complex\).*two parts.*view_as_complex",
    ),
    "complex in between": (lambda w: bowl(torch.fft.fft(w).abs()), MISSING, r"FftC2CBackward0 \(complex\)|FftR2C"),
    "scripted region": (scripted, MISSING, "DifferentiableGraphBackward.*unscripted"),
    "a number": (lambda w: 1.5, TypeError, "expected a tensor.*float"),
    "nothing": (lambda w: None, TypeError, "expected a tensor.*NoneType"),
    "several losses": (lambda w: [bowl(w), bowl(w)], TypeError, "expected a tensor.*list"),
}
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    BAD_LOSSES["chunked cross-entropy"] = (chunked_cross_entropy, MISSING, "linear_cross_entropy.*options=None")
MISTAKES: dict[str, Mistake] = {
    f"{call.__name__}: {name}": Mistake(loss, call, error, message)
    for name, (loss, error, message) in BAD_LOSSES.items()
    for call in (backward, diagonal, attach)
} | {
    "backward: no scalar": Mistake(torch.sin, backward, RuntimeError, r"shape \(2, 3\) is no scalar.*gradient="),
    "diagonal: no scalar": Mistake(torch.sin, diagonal, RuntimeError, r"shape \(2, 3\) is no scalar.*gradient="),
    "backward: gradient of another shape": Mistake(
        bowl, lambda loss, w: hesscale.backward(loss, PAIR), ValueError, r"gradient has shape \(2,\).*shape \(\)"
    ),
    "diagonal: gradient of another shape": Mistake(
        bowl, lambda loss, w: hesscale.diagonal(loss, w, PAIR), ValueError, r"gradient has shape \(2,\).*shape \(\)"
    ),
    "backward: curvature of another shape": Mistake(
        torch.sin,
        lambda y, w: hesscale.backward(y, y.detach(), PAIR),
        ValueError,
        r"curvature has shape \(2,\).*\(2, 3\)",
    ),
    "diagonal: curvature of another shape": Mistake(
        torch.sin, lambda y, w: hesscale.diagonal(y, w, y.detach(), PAIR), ValueError, "curvature has shape"
    ),
    "attach: curvature of another shape": Mistake(
        bowl, lambda loss, w: hesscale.attach(loss, curvature=PAIR), ValueError, "curvature has shape"
    ),
    "gradient that is no tensor": Mistake(bowl, lambda loss, w: hesscale.backward(loss, 1.0), TypeError, "gradient"),
    "curvature that is no tensor": Mistake(
        bowl, lambda loss, w: hesscale.backward(loss, curvature=1.0), TypeError, "curvature"
    ),
    "complex curvature": Mistake(
        bowl, lambda loss, w: hesscale.backward(loss, curvature=1j * ZERO), TypeError, "complex|real"
    ),
    "unknown method": Mistake(
        bowl,
        lambda loss, w: hesscale.backward(loss, method="newton"),
        ValueError,
        "unknown method 'newton': choose one of 'hesscale', 'hesscale_gn', 'bl89'",
    ),
    "output of another graph": Mistake(
        bowl, lambda loss, w: hesscale.backward(loss, output=torch.sin(w)), ValueError, "output is not part of"
    ),
    "output without graph": Mistake(
        bowl, lambda loss, w: hesscale.backward(loss, output=ZERO), ValueError, "output must be a tensor"
    ),
    "output that is no tensor": Mistake(
        bowl, lambda loss, w: hesscale.backward(loss, output=["logits"]), ValueError, "output must be a tensor"
    ),
    "no inputs": Mistake(bowl, lambda loss, w: hesscale.diagonal(loss, []), ValueError, "input"),
    "input without grad": Mistake(
        bowl,
        lambda loss, w: hesscale.diagonal(loss, [w, ZERO]),
        ValueError,
        "every input must be a tensor that requires",
    ),
    "input that is no tensor": Mistake(
        bowl, lambda loss, w: hesscale.diagonal(loss, ["w"]), ValueError, "every input must be a tensor that requires"
    ),
}


def nodes_of(loss: Any) -> Iterator[Any]:
    found: set[Any] = set()
    stack: list[Any] = [getattr(loss, "grad_fn", None)]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack.extend(child for child, _ in node.next_functions)
            yield node


def hooks_on(node: Any) -> int:
    """How many pre-hooks a node has: the handle of one more leads to the dict of all."""
    handle = node.register_prehook(lambda grads: None)
    number = len(handle.hooks_dict_ref()) - 1
    handle.remove()
    return number


def test_hooks_are_counted() -> None:
    loss = bowl(random(2, 3).requires_grad_())
    assert hooks_on(hesscale.attach(loss).grad_fn) == 1
    assert sum(hooks_on(node) for node in nodes_of(bowl(random(2, 3).requires_grad_()))) == 0


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_explained_and_change_nothing(mistake: Mistake, fresh: bool) -> None:
    w = random(2, 3, seed=1).requires_grad_()
    if not fresh:
        hesscale.backward(bowl(w))
    before = None if fresh else (w.grad, w.grad.clone(), w.curvature, w.curvature.clone())
    loss = mistake.loss(w)
    with pytest.raises(mistake.error, match=mistake.message):
        mistake.call(loss, w)
    if before is None:
        assert w.grad is None and not hasattr(w, "curvature")
    else:
        assert w.grad is before[0] and torch.equal(w.grad, before[1])
        assert w.curvature is before[2] and torch.equal(w.curvature, before[3])
    assert sum(hooks_on(node) for node in nodes_of(loss)) == 0


NOT_FINITE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over nothing": lambda w: (bowl(w) * ZERO) / ZERO,
    "division by zero": lambda w: bowl(w) / 0,
    "by a number that vanishes": lambda w: w[0, 0] / (w.sum() - w.sum()),
    "too large": lambda w: w[0, 0] / (1e150 * w.sum()),
    "logarithm of zero": lambda w: (w * ZERO).sum().log(),
    "infinite": lambda w: (1000 * w.abs()).exp().sum(),
}


@pytest.mark.parametrize("loss", NOT_FINITE.values(), ids=NOT_FINITE)
def test_what_torch_can_compute_is_no_mistake(loss: Callable[[Tensor], Tensor]) -> None:
    w, plain = random(2, 3, seed=1).requires_grad_(), random(2, 3, seed=1).requires_grad_()
    hesscale.backward(loss(w))
    loss(plain).backward()
    torch.testing.assert_close(w.grad, plain.grad, rtol=0, atol=0, equal_nan=True)
    assert w.curvature.shape == w.shape


@pytest.mark.parametrize("method", ["hesscale", "bl89"])
def test_methods_without_a_border_ignore_the_output(method: str) -> None:
    x = random(4).requires_grad_()
    gate = torch.sigmoid(x)
    loss = (x * gate).square().sum()
    without = hesscale.diagonal(loss, x, method=method, retain_graph=True)
    torch.testing.assert_close(hesscale.diagonal(loss, x, method=method, output=gate), without, rtol=1e-10, atol=1e-10)


def test_missing_rules_are_counted_for_programs_too() -> None:
    w = random(2, 3).requires_grad_()
    with pytest.raises(NotImplementedError) as caught:
        hesscale.backward(Unknown.apply(Foreign.apply(Unknown.apply(bowl(w)))))
    assert caught.value.counts == {"ForeignBackward": 1, "UnknownBackward": 2}


def test_a_registered_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RULES, "_rows", dict(RULES._rows))  # the row goes when the test ends
    w = random(2, 3).requires_grad_()
    expected = hesscale.diagonal(bowl(w), w)
    hesscale.register(hesscale.Selection(), "UnknownBackward")
    torch.testing.assert_close(hesscale.diagonal(bowl(Unknown.apply(w)), w), expected, rtol=1e-10, atol=1e-10)
    assert hesscale.diagonal(Unknown.apply(bowl(w)), w, method="bl89") is not None  # overlays see later rows


RULE = hesscale.Selection()
REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "taken": ((RULE, "TanhBackward0"), ValueError, "already registered: TanhBackward0.*replace=True"),
    "one of two taken": ((RULE, "NewBackward", "TanhBackward0"), ValueError, r"already registered: TanhBackward0\b"),
    "no names": ((RULE,), ValueError, "name at least one node"),
    "a function": ((torch.sin, "NewBackward"), TypeError, "must be one of the families"),
    "a family, not a rule": ((hesscale.Selection, "NewBackward"), TypeError, "must be one of the families"),
    "names first": (("NewBackward", RULE), TypeError, "must be one of the families"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_register_refuses(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    before = dict(RULES)
    with pytest.raises(error, match=message):
        hesscale.register(*arguments)
    assert dict(RULES) == before


def test_overlays_leave_their_base_alone_and_see_its_later_rows() -> None:
    base = RuleTable()
    old, new = hesscale.Selection(), hesscale.Selection(scaled=True)
    base.register(old, "A", "B")
    overlay = base.overlay({"A": new})
    assert overlay["A"] is new and overlay["B"] is old and base["A"] is old
    base.register(old, "C")
    overlay.register(new, "D")
    assert overlay["C"] is old and "D" not in base
    assert sorted(overlay) == ["A", "B", "C", "D"] and len(overlay) == 4
    with pytest.raises(ValueError, match="already registered: B"):
        overlay.register(new, "B")
    with pytest.raises(KeyError):
        overlay["E"]
