"""What is traced is the eager pass, bit by bit, or is refused before anything has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hesscale
from hesscale import fast
from hesscale.compiled.backend import stand_ins
from hesscale.rules import RULES

from ..rules.case import Case
from ..rules.cases import CASES
from ..versions import OLDEST
from .networks import assert_same, small, vectors

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


NO_FAKE_KERNEL = {"CtcLossBackward0", "CtcLossBackward1", "LinalgLstsqBackward0", "PackPaddedSequenceBackward0"}
"""Operations whose outputs have sizes or values that torch cannot tell without data: no compiler takes them."""


OTHER_RANDOM_NUMBERS = {"NativeDropoutBackward0", "RreluWithNoiseBackward0", "RreluWithNoiseBackward1"}


OTHER_FORMULA = {"ProdBackward0", "ProdBackward1", *(("CumprodBackward0",) if OLDEST else ())}
"""Torch looks for zeros among the factors, and takes the safe way where it cannot look."""


ONE_PER_RULE = [*{RULES[case.node]: case for case in reversed(CASES) if case.node not in NO_FAKE_KERNEL}.values()]
"""Nodes that share a rule share its code; the smallest number of traces that sees all of it."""


WITH_NUMBERS = [case for case in CASES if "number" in case.label]


def traced_pass(case: Case) -> Callable[..., list[Tensor]]:
    """Curvature at the inputs of a case, as a function of its tensors."""

    def run(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        inputs = [
            next(rest).detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in case.inputs
        ]
        leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
        outputs = case.function(*inputs)
        outputs = [outputs] if isinstance(outputs, Tensor) else [out for out in outputs if out.requires_grad]
        y = torch.cat([out.reshape(-1) for out in outputs])
        seed = torch.arange(y.numel(), dtype=y.dtype)
        found = hesscale.diagonal(y, leaves, seed.sin(), seed.cos())
        return [torch.zeros_like(leaf) if s is None else s for s, leaf in zip(found, leaves, strict=True)]

    return run


@pytest.mark.parametrize("case", [*ONE_PER_RULE, *WITH_NUMBERS], ids=lambda case: case.label)
def test_every_rule_is_traced(case: Case) -> None:
    tensors = [value.detach() for value in case.inputs if isinstance(value, Tensor)]
    run = traced_pass(case)
    module = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*stand_ins(tensors)[0])
    pairs = zip(module(*tensors), run(*tensors), strict=True)
    for ours, eager in pairs:
        if case.node in OTHER_RANDOM_NUMBERS:
            assert ours.shape == eager.shape
        elif case.node in OTHER_FORMULA:
            torch.testing.assert_close(ours, eager, rtol=1e-14, atol=1e-14)
        else:
            assert torch.equal(ours, eager)


def test_one_tensor_as_two_arguments_is_not_baked_in() -> None:
    model = nn.Linear(4, 4).double()
    twin = copy.deepcopy(model)
    step = hesscale.compile(lambda m, x, y: F.mse_loss(m(x), y), model, backend="eager")
    x, z = vectors(5)[0], vectors(5)[0] + 1
    step(x, x)
    model.zero_grad()
    step(x, z)
    hesscale.backward(F.mse_loss(twin(x), z))
    assert_same(model, twin)
    assert step.compilations == 1


def test_writes_into_views_and_operations_without_a_rule() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    class Row(torch.autograd.Function):
        """Not element-wise: every output depends on all inputs."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.cumsum(-1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad.flip(-1).cumsum(-1).flip(-1)

    def loss_fn(model: nn.Module, x: Tensor, function: Any) -> Tensor:
        h = model(x)
        h = torch.cat([h, h], 1)
        h[:, 0] = h[:, 1] * 2
        h[:, 2:4] *= 3
        return function.apply(h).square().mean()

    ours, theirs = small(), small()
    step = hesscale.compile(loss_fn, ours, missing="exact", backend="eager")
    step(vectors(5)[0], Cube)
    hesscale.backward(loss_fn(theirs, vectors(5)[0], Cube), missing="exact")
    assert_same(ours, theirs)
    ours.zero_grad()
    step(vectors(5)[0], Row)
    assert ours[0].weight.curvature.isnan().all()  # type: ignore[union-attr, index]


def test_views_may_become_copies_unless_they_are_written_to() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        seen, written = h.view(-1), torch.zeros(3, dtype=torch.float64).view(1, 3)
        written.view(-1).add_(1)
        return (seen.square().view(-1, 3) * written).sum()

    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    ours, theirs = small(), small()
    hesscale.compile(loss_fn, ours, backend=backend)(vectors(5)[0])
    hesscale.backward(loss_fn(theirs, vectors(5)[0]))
    assert_same(ours, theirs)
    views = [node for node in graphs[0].graph.nodes if node.target is torch.ops.aten.view.default]
    assert [node.meta["val"].shape for node in views] == [(1, 3), (3,)]
    assert any(node.target is torch.ops.aten.reshape.default for node in graphs[0].graph.nodes)


OUTSIDE = torch.ones(3, dtype=torch.float64, requires_grad=True)


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "if": (lambda m, x, y: m(x).sum() if x.sum() > 0 else -m(x).sum(), RuntimeError, "asks for the value"),
    "item": (lambda m, x, y: m(x).sum() * [1.0, 2.0][int(y[0].item() > 1)], RuntimeError, "asks for the value"),
    "no loss": (lambda m, x, y: {"loss": m(x).sum()}, TypeError, "not a dict"),
    "no scalar": (lambda m, x, y: m(x), TypeError, r"one of shape \(5, 3\)"),
    "no graph": (lambda m, x, y: m(x).detach().sum(), RuntimeError, "no graph to walk"),
    "a stranger": (lambda m, x, y: (m(x) * OUTSIDE).sum(), ValueError, "neither a parameter"),
    "a generator": (
        lambda m, x, y: m(x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).sum(),
        RuntimeError,
        "draws from a torch.Generator",
    ),
    "dropout in a checkpoint": (
        lambda m, x, y: checkpoint(lambda x: F.dropout(m(x)).tanh(), x, use_reentrant=False).sum(),
        RuntimeError,
        r"within torch\.utils\.checkpoint",
    ),
    "a sparse gradient": (
        lambda m, x, y: F.embedding(y, m[0].weight, sparse=True).square().sum(),
        ValueError,
        "sparse=False",
    ),
    "no rule": (lambda m, x, y: NoRule.apply(m(x)).sum(), hesscale.MissingRuleError, "NoRuleBackward"),
}


class NoRule(torch.autograd.Function):
    """Of which hesscale knows nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_changes_nothing(refused: tuple[Callable[..., Any], type[Exception], str]) -> None:
    loss_fn, error, message = refused
    model = small()
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    step = hesscale.compile(loss_fn, model, backend="eager")
    with pytest.raises(error, match=message):
        step(*vectors(5))
    assert all(p.grad is None and not hasattr(p, "curvature") for p in model.parameters())
    assert {key: dict(vars(module)) for key, module in model.named_modules()} == before


def test_functions_that_insist_on_half_precision_are_run_in_single() -> None:
    class Casts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad.bfloat16() * 2

    model, x = small(torch.bfloat16), vectors(4)[0].bfloat16()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return Casts.apply(m(x)).float().square().mean()

    hesscale.backward(loss(model, x), missing="exact")
    expected = [p.curvature for p in model.parameters()]
    model.zero_grad()
    hesscale.compile(loss, model, missing="exact", backend="eager")(x)
    for p, curvature in zip(model.parameters(), expected, strict=True):
        assert p.curvature.dtype is torch.float32
        assert torch.equal(p.curvature, curvature)


def test_sizes_and_numbers_that_depend_on_data_are_traced() -> None:
    def loss_fn(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return model(x)[mask].square().mean() * x.square().sum().item()

    ours, theirs = small(), small()
    step = hesscale.compile(loss_fn, ours, backend="aot_eager")
    for seed in range(3):
        x = vectors(5)[0] * (seed + 1)
        mask = torch.rand(5, 3, generator=torch.Generator().manual_seed(seed)) > 0.4
        step(x, mask)
        hesscale.backward(loss_fn(theirs, x, mask))
        assert_same(ours, theirs)
    assert step.compilations == 1


def test_fast_paths_are_off_while_tracing() -> None:
    seen: list[bool] = []
    make_fx(lambda x: (seen.append(fast.enabled()), x + 1)[1], tracing_mode="fake")(torch.ones(1))
    assert seen == [False]
    assert fast.enabled()
