"""Numbers and tensors that are no inputs of a compiled pass: read anew in each call, or refused, never baked in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hesscale

from .networks import small

Loss = Callable[..., Tensor]


def compiled(loss_fn: Callable[..., Any], model: nn.Module, **options: Any) -> Any:
    return hesscale.compile(loss_fn, model, backend="eager", **options)


def batch(count: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def found(model: nn.Module) -> list[Tensor]:
    return [t for p in model.parameters() for t in (p.grad, p.curvature)]  # type: ignore[misc, attr-defined]


def assert_eager(step: Any, loss_fn: Loss, model: nn.Module, *args: Any) -> None:
    model.zero_grad()
    step(*args)
    ours = [t.clone() for t in found(model)]
    model.zero_grad()
    hesscale.backward(loss_fn(model, *args))
    for mine, eager in zip(ours, found(model), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)


SYMBOLIC: dict[str, Loss] = {
    "divided by a size": lambda m, x: (m(x) / x.shape[0]).square().mean(),
    "times a size": lambda m, x: (m(x) * x.shape[0]).square().mean(),
    "a size over it": lambda m, x: (x.shape[0] / (m(x) + 9)).square().mean(),
    "times a root of a size": lambda m, x: (m(x) * x.shape[0] ** -0.5).square().mean(),
    "mean pooling": lambda m, x: (m(x).sum(0) / x.shape[0]).square().sum(),
    "times a value": lambda m, x: (m(x) * x.sum().item()).square().mean(),
    "divided by a value": lambda m, x: (m(x) / x.sum().item()).square().mean(),
    "a value over it": lambda m, x: (x.sum().item() / (m(x) + 9)).square().mean(),
    "the number that stands for a symbol": lambda m, x: (m(x) / 7777777).square().mean() * 1e13,
}


@pytest.mark.parametrize("name", SYMBOLIC)
@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_that_are_symbols_while_tracing(name: str, dynamic: bool) -> None:
    model, loss_fn = small(), SYMBOLIC[name]
    step = compiled(loss_fn, model, dynamic=dynamic)
    for count in (5, 3):
        assert_eager(step, loss_fn, model, batch(count, seed=count))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
def test_what_is_written_to_a_tensor_of_the_closure_is_seen(dtype: torch.dtype) -> None:
    model, t = small(), torch.ones((), dtype=dtype)
    losses: list[Loss] = [
        lambda m, x: (m(x) * t).square().mean(),
        lambda m, x: (m(x) / (t + 1)).square().mean(),
        lambda m, x: (t / (m(x) + 9)).square().mean(),
        lambda m, x: torch.where(t > 0, m(x), m(x).tanh()).square().mean(),
    ]
    for loss_fn in losses:
        t.fill_(1)
        step = compiled(loss_fn, model)
        assert_eager(step, loss_fn, model, batch())
        t.fill_(0 if dtype == torch.bool else 3)
        assert_eager(step, loss_fn, model, batch())
        assert step.compilations == 1


def test_tracing_writes_to_nothing() -> None:
    model, count, mean = small(), torch.zeros(()), torch.ones(3, dtype=torch.float64)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        count.add_(1)
        z = model(x)
        mean.mul_(0.5).add_(z.detach().mean(0))
        return (z - mean).square().mean() * count

    step, by_hand = compiled(loss_fn, model), torch.ones(3, dtype=torch.float64)
    for calls in (1, 2):
        by_hand = by_hand * 0.5 + model(batch()).detach().mean(0)
        step(batch())
        assert count == calls
        torch.testing.assert_close(mean, by_hand)


def test_a_refused_trace_has_written_nothing() -> None:
    count = torch.zeros(())

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        count.add_(1)
        return model(x).square().mean() if x.sum() > 0 else model(x).mean()

    with pytest.raises(RuntimeError, match="asks for the value of a tensor"):
        compiled(loss_fn, small())(batch())
    assert count == 0


@pytest.mark.parametrize(
    "ask", [Tensor.item, float, int, Tensor.tolist, lambda t: float(t.numpy()), lambda t: t.equal(t)]
)
def test_the_value_of_a_tensor_of_the_closure_is_not_told(ask: Callable[[Tensor], Any]) -> None:
    t = torch.tensor(2.0)
    with pytest.raises(RuntimeError, match="asks for the value of a tensor"):
        compiled(lambda m, x: (m(x) * ask(t)).square().mean(), small())(batch())


def test_a_buffer_that_appears_is_refused() -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()
            self.register_buffer("mu", None)

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.inner(x)
            self.mu = z.detach().mean(0) if self.mu is None else 0.9 * self.mu + 0.1 * z.detach().mean(0)
            return z - self.mu

    model = Centered()
    step = compiled(lambda m, x: m(x).square().mean(), model)
    with pytest.raises(ValueError, match="adds or removes the buffer 'mu'"):
        step(batch())
    assert model.mu is None
    model(batch())
    step(batch())
    assert model.mu is not None


def test_a_buffer_that_requires_grad_is_a_leaf() -> None:
    model = small()
    model.register_buffer("scale", torch.tensor([2.0], dtype=torch.float64, requires_grad=True))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * model.scale).square().mean()

    compiled(loss_fn, model)(batch())
    scale: Any = model.scale
    ours = scale.grad.clone(), scale.curvature.clone()
    scale.grad = None
    hesscale.backward(loss_fn(model, batch()))
    torch.testing.assert_close(ours, (scale.grad, scale.curvature), rtol=1e-12, atol=1e-12)


@dataclass
class Out:
    logits: Any


@pytest.mark.parametrize("hide", [Out, lambda z: {z}])
def test_tensors_do_not_leave_in_what_cannot_be_seen_into(hide: Callable[[Tensor], Any]) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        z = model(x)
        return z.square().mean(), hide(z)

    with pytest.raises(TypeError, match="that holds tensors"):
        compiled(loss_fn, small())(batch())


def test_nothing_of_a_trace_stays_in_the_model() -> None:
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.log, self.last = small(), [], {}
            self.log: list[Any] = []
            self.last: dict[str, Any] = {}

        def forward(self, x: Tensor) -> Any:
            z = self.inner(x)
            self.log.append(z.mean().item())
            self.last["z"] = z.detach()
            return z

    model = Logging()
    compiled(lambda m, x: m(x).square().mean(), model)(batch())
    assert model.log == [] and model.last == {}


def test_a_hook_that_raises_leaves_gradients_as_they_were() -> None:
    model, calls = small(), [0]
    step = compiled(lambda m, x: m(x).square().mean(), model)
    step(batch())
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    def fail(grad: Tensor) -> None:
        calls[0] += 1
        raise ArithmeticError("no")

    handle = model[2].bias.register_hook(fail)
    with pytest.raises(ArithmeticError):
        step(batch())
    handle.remove()
    assert calls == [1]
    assert all(map(torch.equal, [p.grad for p in model.parameters()], before))  # type: ignore[arg-type]
