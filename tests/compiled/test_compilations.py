"""When a pass is compiled anew, what is said of it, and what the compiler makes of it."""

from __future__ import annotations

import copy
import gc
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import hesscale
from hesscale.compiled import step as steps
from hesscale.compiled.backend import refuse_wrong, without_mkldnn
from hesscale.fast import workspace

from ..rules.cases import CASES
from .networks import Tied, assert_same, cross_entropy, loss_of_case, pair, small, vectors, words

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


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
        "parameters: .* became .'more'",
    ),
    "a layer": (
        lambda model: (model.__setitem__(1, nn.Sequential(nn.Tanh(), nn.Tanh())), vectors(6))[1],  # type: ignore[operator]
        "forward: .*Tanh.forward .*became .*Sequential.forward",
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
    for p in model.parameters():
        p.curvature = None  # where a parameter was frozen, that of earlier steps
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


def test_a_compiled_model_is_told_about_this() -> None:
    model = torch.compile(small(), backend="aot_eager")
    with pytest.raises(hesscale.MissingRuleError, match=r"hesscale\.compile\(loss_fn, model\)"):
        hesscale.backward(cross_entropy(model, *vectors(4)))  # type: ignore[arg-type]


compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")


REPRESENTATIVES = (
    "AddmmBackward0",
    "ConvolutionBackward0-2d",
    "EmbeddingBackward0",
    "GeluBackward0",
    "LogSoftmaxBackward0",
    "NativeLayerNormBackward0",
)
"""Of all rules, which ``benchmarks/compiled_agreement.py`` compiles in an hour or two."""


@compiler
@pytest.mark.parametrize("label", REPRESENTATIVES)
def test_inductor_agrees_on_rules(label: str) -> None:
    case = next(case for case in CASES if case.label == label)
    loss_fn, model = loss_of_case(case), nn.Module()
    ours, theirs = ([_copied(v) for v in case.inputs if isinstance(v, Tensor)] for _ in range(2))
    hesscale.compile(loss_fn, model)(*ours)
    hesscale.backward(loss_fn(model, *theirs))
    for a, b in zip(ours, theirs, strict=True):
        for name in ("grad", "curvature"):
            found, expected = getattr(a, name, None), getattr(b, name, None)
            assert (found is None) == (expected is None)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@compiler
def test_no_large_allocation_in_a_steady_state(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)).double()
    optimizer = hesscale.AdaHesScale(model.parameters())
    step = optimizer.compile(cross_entropy, model)
    x, y = torch.randn(6, 300, dtype=torch.float64), vectors(6)[1]

    made, buffer = [], workspace._Buffer
    monkeypatch.setattr(workspace, "_Buffer", lambda *layout: (made.append(layout), buffer(*layout))[1])
    for number in range(6):
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
        if number == 2:
            assert made  # what Inductor allocates comes from here
            made.clear()
    assert not made
    assert step.compilations == 1
    held = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    step(x, y)
    assert len(made) >= 2  # in place of those that are held
    assert all(grad is not None for grad in held)


@compiler
def test_inductor_draws_anew_and_again_after_a_seed() -> None:
    """What a unit passes on and what it gets back are drawn once: both are zero for the same ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3)).double()
    step = hesscale.compile(cross_entropy, model)
    seen = []
    for seed in (1, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        model.zero_grad()
        step(*(t[:1] for t in vectors(5)))
        dropped = model[2].weight.grad.abs().sum(0) == 0  # type: ignore[union-attr]
        assert torch.equal(dropped, model[0].weight.curvature.abs().sum(1) == 0)  # type: ignore[operator]
        seen.append(dropped)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert step.compilations == 1


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


@pytest.mark.parametrize(
    ("options", "is_wrong"),
    [
        ({}, False),
        ({"ceil_mode": True}, True),
        ({"ceil_mode": True, "count_include_pad": False}, False),
        ({"ceil_mode": True, "divisor_override": 3}, False),
    ],
)
def test_what_inductor_computes_wrongly_is_refused(options: dict[str, Any], is_wrong: bool) -> None:
    def average(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(F.avg_pool2d(x, 3, 2, **options).square().sum(), x)
        return found

    module = make_fx(average)(torch.randn(1, 1, 6, 6, requires_grad=True))
    with pytest.raises(ValueError, match="wrong gradient of avg_pool2d") if is_wrong else nullcontext():
        refuse_wrong(module)
