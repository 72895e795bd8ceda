"""A pass through compiled regions gives what the eager pass gives, wherever the loss begins and whatever is asked."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.rules import registered

from .networks import Tied, compare, compiled, cross_entropy, small, vectors, words


class TwoHeads(nn.Module):
    """Two outputs, one of which a loss may leave alone, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        h = self.frozen(torch.tanh(self.body(x)))
        return self.first(h), self.second(h).exp()


def both(model: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = model(x)
    return F.cross_entropy(a, y) + b.square().mean()


def one(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[0], y)


class Broken(nn.Module):
    """Two regions, since Dynamo cannot look into a print."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small(), nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)).double()

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(h)


def images(count: int) -> tuple[Tensor, Tensor]:
    x, y = vectors(count)
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(count), dtype=x.dtype), y


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 3)),
    ).double()


NETWORKS: dict[str, tuple[Any, Any, Any]] = {
    "perceptron": (small, vectors, cross_entropy),
    "convolutions and batch norm": (convolutional, images, cross_entropy),
    "tied weights and an LSTM": (lambda: Tied().double(), words, cross_entropy),
    "two heads": (lambda: TwoHeads().double(), vectors, both),
    "a head that is not used": (lambda: TwoHeads().double(), vectors, one),
    "a graph break": (Broken, vectors, cross_entropy),
}


@pytest.mark.parametrize("whole", [False, True], ids=["loss outside", "whole loss"])
@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
@pytest.mark.parametrize("name", NETWORKS)
def test_methods(name: str, method: str, whole: bool) -> None:
    make, batch, loss_fn = NETWORKS[name]
    model = compare(make(), batch(6), batch(6), loss_fn=loss_fn, whole=whole, method=method)
    assert {p.curvature.method for p in model.parameters() if p.requires_grad and p.grad is not None} == {method}


def test_a_compiled_layer_in_an_eager_model() -> None:
    model = small()
    model[1] = nn.Sequential(nn.Tanh(), nn.Linear(5, 5), nn.GELU()).double()
    twin, (x, y) = small(), vectors(6)
    twin[1] = nn.Sequential(nn.Tanh(), nn.Linear(5, 5), nn.GELU()).double()
    twin.load_state_dict(model.state_dict())
    model[1] = compiled(model[1])
    for net in (model, twin):
        hesscale.backward(cross_entropy(net, x, y))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.curvature, q.curvature, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("where", ["features", "logits", "both"])
def test_output_inside_of_a_region_and_before_it(where: str) -> None:
    """``hesscale_gn`` with ``output=`` a tensor that a region returns, or that goes into it."""
    body, head = small(), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)).double()

    def tail(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(h)
        return F.cross_entropy(logits.sin(), y), logits

    x, y = vectors(6)
    found = []
    for function in (tail, compiled(tail)):
        h = body(x)
        loss, logits = function(h, y)
        output = {"features": h, "logits": logits, "both": [h, logits]}[where]
        found.append(
            hesscale.diagonal(loss, [*head.parameters(), *body.parameters()], method="hesscale_gn", output=output)
        )
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rank", [1, "full"])
@pytest.mark.parametrize("name", ["perceptron", "tied weights and an LSTM", "convolutions and batch norm"])
def test_rank_where_the_region_holds_the_loss(name: str, rank: Any) -> None:
    make, batch, loss_fn = NETWORKS[name]
    compare(make(), batch(6), loss_fn=loss_fn, whole=True, rank=rank)


def test_rank_needs_sizes_that_are_known() -> None:
    model = small()
    loss = compiled(cross_entropy, dynamic=True)(model, *vectors(6))
    with pytest.raises(ValueError, match="dynamic=False"):
        hesscale.backward(loss, rank=1)


def test_a_backward_that_takes_a_size_for_granted_is_refused_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from hesscale.compiled.pieces import Pieces

    lowered = Pieces._lowered

    def specialized(pieces: Any, *args: Any) -> Any:
        assert any(size == 6 for size in pieces._capture.inputs if isinstance(size, torch.SymInt))
        return lowered(pieces, *args)

    monkeypatch.setattr(Pieces, "_lowered", specialized)
    model = small()
    ours = compiled(model, dynamic=True)
    hesscale.backward(cross_entropy(ours, *vectors(6)))
    with pytest.raises(RuntimeError, match="compiled for sizes of which"):
        hesscale.backward(cross_entropy(ours, *vectors(5)))


def test_rank_of_a_loss_outside_is_refused() -> None:
    model = small()
    loss = cross_entropy(compiled(model), *vectors(6))
    with pytest.raises(ValueError, match="compile the two together"):
        hesscale.backward(loss, rank=1)
    assert all(p.grad is None for p in model.parameters())


class Cube(torch.autograd.Function):
    """Element-wise, and without a rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def test_an_operation_without_a_rule() -> None:
    """Forward and plain backward run; curvature is refused by name, or had by autograd."""
    model, (x, y) = small(), vectors(6)

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            torch.special.airy_ai(torch.zeros(())) * 0 + torch.fft.rfft(model(x)).abs(), y.clamp(max=1)
        )

    ours = compiled(loss_fn)
    ours(model, x, y).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(hesscale.MissingRuleError, match="FftR2CBackward0"):
        hesscale.backward(ours(model, x, y))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), plain, strict=True))


def test_functions_of_ones_own_are_kept_whole() -> None:
    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(Cube.apply(model(x)), y)

    with pytest.raises(hesscale.MissingRuleError, match=r"torch\.compiler\.allow_in_graph"):
        compare(small(), vectors(6), loss_fn=loss_fn, whole=True, missing="exact")
    torch.compiler.allow_in_graph(Cube)
    torch._dynamo.reset()
    compare(small(), vectors(6), loss_fn=loss_fn, whole=True, missing="exact")
    cube = hesscale.Elementwise(lambda node: (3 * node.saved_tensors[0] ** 2, 6 * node.saved_tensors[0]))
    with registered(cube, Cube):
        compare(small(), vectors(6), loss_fn=loss_fn, whole=True)


def test_check_names_what_is_inside() -> None:
    model, (x, y) = convolutional(), images(6)
    eager, ours = (hesscale.check(cross_entropy(net, x, y)) for net in (model, compiled(model)))
    assert eager.exact == ours.exact
    assert eager.approximated == ours.approximated
    assert eager.missing == ours.missing


@pytest.mark.parametrize("dynamic", [None, True])
def test_batches_of_any_size(dynamic: bool | None) -> None:
    compare(convolutional(), images(6), images(5), images(7), compile_options={"dynamic": dynamic})
    compare(small(), vectors(6), vectors(5), vectors(7), whole=True, compile_options={"dynamic": dynamic})


def test_inputs_that_require_grad_and_what_is_asked_of_them() -> None:
    model, (x, y) = small(), vectors(6)
    x.requires_grad_()
    first = model[0].weight
    found = []
    for net in (model, compiled(model)):
        found.append(hesscale.diagonal(cross_entropy(net, x, y), [x, first]))
        hesscale.backward(cross_entropy(net, x, y), inputs=[first])
        assert x.grad is None and model[2].weight.grad is None
        found[-1] += (first.grad, first.curvature)
        first.grad = first.curvature = None
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-12)


def test_a_graph_that_is_kept() -> None:
    model = small()
    loss = cross_entropy(compiled(model), *vectors(6))
    hesscale.backward(loss, retain_graph=True)
    once = model[0].weight.curvature.clone()
    loss.backward(retain_graph=True)
    hesscale.backward(loss)
    torch.testing.assert_close(model[0].weight.curvature, 2 * once)
    with pytest.raises(RuntimeError, match="freed"):
        hesscale.backward(loss)


def test_second_derivatives_by_autograd_are_refused() -> None:
    model = small()
    grads = torch.autograd.grad(cross_entropy(compiled(model), *vectors(6)), [*model.parameters()], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grads[0].sum().backward()


@pytest.mark.parametrize("whole", [False, True], ids=["loss outside", "whole loss"])
def test_autocast_and_half_precision(whole: bool) -> None:
    tolerance = 2e-2

    def check(a: Tensor, b: Tensor) -> bool:
        return bool(((a - b).abs() <= tolerance * (b.abs() + b.abs().max())).all())

    batch = vectors(6, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(small(torch.float32), batch, whole=whole, check=check)
    half = batch[0].bfloat16(), batch[1]
    model = compare(small(torch.bfloat16), half, whole=whole, check=check)
    assert model[0].weight.curvature.dtype is torch.float32  # type: ignore[index]


def test_gradients_come_from_the_curvature_pass() -> None:
    """A pass with curvature runs one piece of code, not two."""
    from hesscale.compiled.region import Region

    calls = []
    run = Region._run

    def counted(*args: Any) -> Any:
        calls.append(args[1])
        return run(*args)

    model = small()
    ours = compiled(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "_run", counted)
        hesscale.backward(cross_entropy(ours, *vectors(6)))
        cross_entropy(ours, *vectors(6)).backward()
    assert len(calls) == 2


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
def test_by_inductor_in_memory_that_is_used_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3))
    twin, ours = copy.deepcopy(model), compiled(model, backend="inductor")
    held: list[tuple[Tensor, Tensor]] = []
    for number in range(4):
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(number))
        for net, p in ((ours, model), (twin, twin)):
            hesscale.backward(cross_entropy(net, x, torch.arange(5) % 3))
            assert all((q.grad is None) == (q.curvature is None) for q in p.parameters())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(p.curvature, q.curvature, rtol=1e-5, atol=1e-7)
        if number % 2:  # somebody keeps what later passes must not write to
            held.append((model[0].weight.curvature, model[0].weight.curvature.clone()))
        model.zero_grad()
        twin.zero_grad()
    assert all(torch.equal(kept, copied) for kept, copied in held)


def test_hooks() -> None:
    """Of tensors, nodes, parameters; of a gradient that a hook has changed the curvature is computed anew."""
    model, twin = small(), small()
    seen = []
    for net in (model, twin):
        net[0].weight.register_hook(lambda grad: grad * 2)
        net[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        out = (compiled(net) if net is model else net)(vectors(6)[0])
        out.register_hook(lambda grad: grad * 3)
        hesscale.backward(F.cross_entropy(out, vectors(6)[1]))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(p.curvature, q.curvature, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(seen[0], seen[1])
