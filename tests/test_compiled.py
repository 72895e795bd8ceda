"""Compiled passes: what is traced is the eager pass, bit by bit; a step writes what ``backward`` would write."""

from __future__ import annotations

import copy
import gc
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hesscale
from hesscale import compiled, fast
from hesscale.compiled import step as steps
from hesscale.compiled.backend import stand_ins, without_mkldnn
from hesscale.rules import RULES

from .rules.case import Case
from .rules.cases import CASES

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

NO_FAKE_KERNEL = {"CtcLossBackward0", "CtcLossBackward1", "LinalgLstsqBackward0", "PackPaddedSequenceBackward0"}
"""Operations whose outputs have sizes or values that torch cannot tell without data: no compiler takes them."""
OTHER_RANDOM_NUMBERS = {"NativeDropoutBackward0", "RreluWithNoiseBackward0", "RreluWithNoiseBackward1"}
OTHER_FORMULA = {"ProdBackward0", "ProdBackward1"}
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


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Tied(nn.Module):
    """Embedding and head share a weight; batch norm, a gate written out, a learned scalar and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)
        self.memory, self.head = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, tokens: Tensor) -> Any:
        h = self.norm(self.embedding(tokens).mT).mT
        h, _ = self.memory(h * torch.sigmoid(h))
        return self.head(h.mean(1) * self.scale) / 2.0


def words(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (count, 2), generator=generator), torch.randint(11, (count,), generator=generator)


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def vectors(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=generator, dtype=dtype), torch.randint(3, (count,), generator=generator)


def assert_same(ours: nn.Module, eager: nn.Module, check: Callable[[Any, Any], bool] = torch.equal) -> None:
    """Parameters, gradients, curvature and buffers."""
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert check(p, q), name
        for a, b in ((p.grad, q.grad), (getattr(p, "curvature", None), getattr(q, "curvature", None))):
            assert (a is None) == (b is None), name
            assert a is None or check(a, b), name
    for (name, p), q in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
        assert check(p, q[1]), name


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, compiled.Step]:
    """A model, its twin, and the step of the former."""
    twin = copy.deepcopy(model)
    return model, twin, hesscale.compile(cross_entropy, model, **{"backend": "eager", **options})


def test_training_is_the_eager_one() -> None:
    """50 steps of two micro-batches each, with a schedule, and a smaller batch at the end of each epoch."""
    torch.manual_seed(0)
    ours = Tied().double()
    theirs = copy.deepcopy(ours)
    optimizers = [hesscale.AdaHesScale(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 10, 0.5) for o in optimizers]
    step = optimizers[0].compile(cross_entropy, ours, backend="aot_eager")
    for number in range(50):
        count = 3 if number % 10 == 9 else 6
        for micro in range(2):
            batch = words(count, 2 * number + micro)
            with without_mkldnn():  # whose LSTM rounds otherwise
                loss = cross_entropy(theirs, *batch)
                optimizers[1].backward(loss)
            torch.testing.assert_close(step(*batch), loss.detach(), rtol=1e-12, atol=1e-12)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert_same(ours, theirs, lambda a, b: torch.allclose(a, b, rtol=1e-8, atol=1e-8))
    assert step.compilations == 2


def test_traced_is_eager_bit_by_bit_and_accumulates() -> None:
    torch.manual_seed(0)
    ours, theirs, step = pair(Tied().double())
    for number in range(4):
        with without_mkldnn():
            hesscale.backward(cross_entropy(theirs, *words(5, number)))
        step(*words(5, number))
        assert_same(ours, theirs)
        if number == 1:
            ours.zero_grad()
            theirs.zero_grad()
        if number == 2:  # afresh as well: the curvature belonged to gradients that are zero now
            ours.zero_grad(set_to_none=False)
            theirs.zero_grad(set_to_none=False)
    assert step.compilations == 1


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
def test_methods(method: str) -> None:
    ours, theirs, step = pair(small(), method=method)
    step(*vectors(6))
    hesscale.backward(cross_entropy(theirs, *vectors(6)), method=method)
    assert_same(ours, theirs)
    assert ours[0].weight.curvature.method == method  # type: ignore[union-attr, index]


def test_output_and_whatever_else_the_loss_returns() -> None:
    ours, theirs = small(), small()

    def loss_fn(model: nn.Module, x: Tensor, *, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
        out = model(x)
        q = out.softmax(-1)
        return F.nll_loss(q.log(), y), {"out": out, "kind": "nll", "q": q}

    step = hesscale.compile(loss_fn, ours, method="hesscale_gn", output=lambda loss, more: more["out"], backend="eager")
    x, y = vectors(5)
    loss, more = step(x, y=y)
    expected, theirs_more = loss_fn(theirs, x, y=y)
    hesscale.backward(expected, method="hesscale_gn", output=theirs_more["out"])
    assert_same(ours, theirs)
    assert torch.equal(loss, expected)
    assert more["kind"] == "nll"
    assert torch.equal(more["q"], theirs_more["q"])
    assert not more["q"].requires_grad


def test_frozen_and_unused_parameters_and_inputs_that_require_grad() -> None:
    model = small()
    model[2].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    ours, theirs, step = pair(model)
    (x, y), other = vectors(5), vectors(5)[0].requires_grad_()
    x.requires_grad_()
    step(x, y)
    hesscale.backward(cross_entropy(theirs, other, y))
    assert_same(ours, theirs)
    assert torch.equal(x.grad, other.grad)
    assert torch.equal(x.curvature, other.curvature)  # type: ignore[attr-defined]
    ours[2].bias.requires_grad_(True)  # type: ignore[union-attr, index]
    step(x.detach(), y)
    assert ours[2].bias.curvature is not None  # type: ignore[union-attr, index]
    assert step.compilations == 2


def test_parametrizations() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3).double())
    ours, theirs, step = pair(layer)
    step(*vectors(5))
    hesscale.backward(cross_entropy(theirs, *vectors(5)))
    assert_same(ours, theirs)


def test_hooks_on_parameters_run() -> None:
    ours, theirs, step = pair(small())
    seen: list[int] = []
    for model in (ours, theirs):
        model[0].weight.register_hook(lambda grad: grad * 2)  # type: ignore[union-attr, index, operator]
        model[0].bias.register_post_accumulate_grad_hook(  # type: ignore[union-attr, index, operator]
            lambda p: seen.append(1)
        )
    step(*vectors(5))
    hesscale.backward(cross_entropy(theirs, *vectors(5)))
    assert torch.equal(ours[0].weight.grad, theirs[0].weight.grad)  # type: ignore[union-attr, index, arg-type]
    assert len(seen) == 2


def test_gradients_that_are_one_tensor_or_an_input_are_kept_apart() -> None:
    """Two biases that are added get the same gradient, and w in Σwx gets x itself."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.a, self.b = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x).sum() + (self.a + self.b).pow(2).sum()

    model, x = Sums(), torch.arange(3.0, dtype=torch.float64)
    step = hesscale.compile(lambda m, x: m(x), model, backend="eager")
    step(x)
    grads = [p.grad for p in model.parameters()]
    model.a.grad.mul_(0)  # type: ignore[union-attr]
    model.w.grad.mul_(0)  # type: ignore[union-attr]
    model.a.curvature.mul_(0)  # type: ignore[attr-defined]
    assert torch.equal(x, torch.arange(3.0, dtype=torch.float64))
    assert torch.equal(grads[2], torch.full_like(x, 4.0))  # type: ignore[arg-type]
    assert torch.equal(model.b.curvature, torch.full_like(x, 2.0))  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout_draws_anew_and_again_after_a_seed(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    step = hesscale.compile(cross_entropy, model, backend=backend)
    batch = vectors(5, torch.float32)
    torch.manual_seed(1)
    first = [step(*batch).item() for _ in range(3)]
    assert len(set(first)) == 3
    torch.manual_seed(1)
    assert [step(*batch).item() for _ in range(3)] == first
    model.eval()
    assert step(*batch).item() == step(*batch).item()
    assert step.compilations == 2


def test_buffers_that_are_replaced() -> None:
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.last = x * self.w
            return (self.last - self.mean).square().mean()

    ours, theirs = Average(), Average()
    step = hesscale.compile(lambda m, x: m(x), ours, backend="aot_eager")
    for number in range(3):
        x = vectors(number + 2)[0][:2]
        step(x)
        hesscale.backward(theirs(x))
        assert_same(ours, theirs)
    assert ours.last is None  # tracing leaves nothing without values behind


def test_every_knows_when_curvature_is_due() -> None:
    ours, theirs = small(), small()
    optimizers = [hesscale.AdaHesScaleGN(m.parameters(), lr=1e-2, every=3) for m in (ours, theirs)]
    step = optimizers[0].compile(cross_entropy, ours, backend="eager")
    for _ in range(7):
        due = optimizers[0].curvature_due
        step(*vectors(6))
        assert (getattr(ours[0].weight, "curvature", None) is not None) == due
        optimizers[1].backward(cross_entropy(theirs, *vectors(6)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours, theirs)
    assert step.compilations == 2


def test_mixed_precision() -> None:
    ours, theirs, step = pair(small(torch.float32))
    batch = vectors(6, torch.float32)
    for dtype in (torch.bfloat16, None):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            step(*batch)
            loss = cross_entropy(theirs, *batch)
        hesscale.backward(loss)
        assert_same(ours, theirs)
        ours.zero_grad()
        theirs.zero_grad()
    assert step.compilations == 2


def test_a_loss_scale_is_an_argument() -> None:
    ours, theirs = small(torch.float32), small(torch.float32)
    optimizers = [hesscale.AdaHesScale(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in optimizers]
    step = optimizers[0].compile(lambda m, x, y, scale: scale * cross_entropy(m, x, y), ours, backend="eager")
    for _ in range(3):
        step(*vectors(6, torch.float32), scalers[0].scale(torch.ones(())))
        optimizers[1].backward(scalers[1].scale(cross_entropy(theirs, *vectors(6, torch.float32))))
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(ours, theirs, lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-7))


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "shape": (lambda model: vectors(7), "batch: .*became"),
    "dtype": (
        lambda model: (vectors(6)[0], vectors(6)[1].int().long().double().softmax(0)[:, None].expand(6, 3)),
        "batch",
    ),
    "training": (lambda model: (model.eval(), vectors(6))[1], "training: True became False"),
    "frozen": (lambda model: (model[0].requires_grad_(False), vectors(6))[1], "parameters: "),  # type: ignore[operator]
    "a parameter more": (
        lambda model: (model.register_parameter("more", nn.Parameter(torch.ones(1))), vectors(6))[1],
        "parameters changed",
    ),
    "a layer": (
        lambda model: (model.__setitem__(1, nn.Sequential(nn.Tanh(), nn.Tanh())), vectors(6))[1],  # type: ignore[operator]
        "training changed",
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_compiled_once_and_explained(
    change: tuple[Callable[[nn.Module], Any], str], caplog: pytest.LogCaptureFixture
) -> None:
    model = small()
    step = hesscale.compile(cross_entropy, model, backend="eager")
    step(*vectors(6))
    step(*vectors(6))
    assert step.compilations == 1
    batch = change[0](model)
    caplog.set_level(logging.INFO, "hesscale.compile")
    step(*batch)
    step(*batch)
    assert step.compilations == 2
    assert any(re.search(change[1], line) for line in caplog.messages)
    model.zero_grad()
    twin = copy.deepcopy(model)
    step(*batch)
    hesscale.backward(cross_entropy(twin, *batch))
    assert_same(model, twin)


@pytest.mark.parametrize("make", ["convolution", "tied"])
def test_one_graph_for_all_sizes(make: str) -> None:
    torch.manual_seed(0)
    if make == "tied":
        model: nn.Module = Tied()
        batches = [words(count, count) for count in (6, 9)]
    else:
        layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Linear(3, 3))
        batches = [(torch.randn(n, 2, n + 3, 8, dtype=torch.float64), vectors(n)[1]) for n in (6, 9)]
    ours, theirs, step = pair(model.double(), dynamic=True)
    for batch in batches:
        step(*batch)
        with without_mkldnn():
            hesscale.backward(cross_entropy(theirs, *batch))
        assert_same(ours, theirs, lambda a, b: torch.allclose(a, b, rtol=1e-12, atol=1e-12))
    assert step.compilations == 1
    step(*(t[:1] for t in batches[0]))  # one is not a size like others: it broadcasts
    assert step.compilations == 2


def test_many_compilations_are_warned_of_and_few_are_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_KEPT", 3)
    step = hesscale.compile(cross_entropy, small(), backend="eager")
    for count in range(2, 12):
        step(*vectors(count))
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert len(step._programs) == 3


def test_a_long_compilation_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_SLOW", 0.0)
    hesscale.compile(cross_entropy, small(), backend="eager")(*vectors(6))
    assert any("still compiling" in line for line in caplog.messages)


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


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        hesscale.compile(cross_entropy, print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown method"):
        hesscale.compile(cross_entropy, small(), method="newton")
    with pytest.raises(ValueError, match="sample"):
        hesscale.compile(cross_entropy, small(), missing="sample")
    with pytest.raises(ValueError, match="no leaf"):
        hesscale.compile(cross_entropy, small(), backend="eager")(vectors(5)[0].requires_grad_() * 2, vectors(5)[1])
    with pytest.raises(ValueError, match="can be compiled"):
        hesscale.AdaHessian(small().parameters()).compile(cross_entropy, small())
    with pytest.raises(ValueError, match="_orig_mod"):
        hesscale.compile(cross_entropy, torch.compile(small(), backend="eager"))  # type: ignore[arg-type]


def test_models_that_are_spread_over_processes_are_refused() -> None:
    copies = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(copies)
    with pytest.raises(NotImplementedError, match="does not compile DistributedDataParallel"):
        hesscale.compile(cross_entropy, nn.Sequential(copies))
    shard = small()
    shard[0].weight.to_local = None
    with pytest.raises(NotImplementedError, match="spread over processes"):
        hesscale.compile(cross_entropy, shard)


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


def test_a_compiled_model_is_told_about_this() -> None:
    model = torch.compile(small(), backend="aot_eager")
    with pytest.raises(hesscale.MissingRuleError, match=r"hesscale\.compile\(loss_fn, model\)"):
        hesscale.backward(cross_entropy(model, *vectors(4)))  # type: ignore[arg-type]


compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")


@compiler
def test_inductor_computes_the_same_in_the_same_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)).double()
    ours, theirs, step = pair(model, backend="inductor")
    x, y = torch.randn(6, 300, dtype=torch.float64), vectors(6)[1]
    addresses: list[set[int]] = []
    for _ in range(4):
        ours.zero_grad()
        gc.collect()
        step(x, y)
        addresses.append({t.data_ptr() for t in large_results(ours)})
    hesscale.backward(cross_entropy(theirs, x, y))
    assert_same(ours, theirs, lambda a, b: torch.allclose(a, b, rtol=1e-12, atol=1e-12))
    assert addresses[1] == addresses[2] == addresses[3]
    held = [t.clone() for t in large_results(ours)], [*large_results(ours)]
    ours.zero_grad()
    step(x * 2, y)  # somebody holds them: they stay what they are
    assert all(map(torch.equal, *held))
    assert {t.data_ptr() for t in large_results(ours)}.isdisjoint(addresses[3])


def large_results(model: nn.Module) -> Iterator[Tensor]:
    """The gradient and curvature of the first layer, which are large enough to be reused."""
    weight: Any = model[0].weight  # type: ignore[index]
    yield from (weight.grad, weight.curvature)
