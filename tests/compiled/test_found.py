"""Losses and models that compiled code once got wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hesscale

from .networks import compiled, small, vectors


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def agree(make: Callable[[Callable[..., Any]], tuple[Tensor, list[Tensor]]], backend: str = "aot_eager") -> None:
    """``make(compiled)`` and ``make`` of the functions themselves: loss, gradients and curvature of the leaves."""
    results = []
    for wrap in (partial(compiled, backend=backend), lambda function: function):
        torch.manual_seed(0)
        loss, leaves = make(wrap)
        hesscale.backward(loss)
        results.append([loss.detach(), *(value for t in leaves for value in (t.detach(), t.grad, t.curvature))])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-12)


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "noise that the plain backward does not need": lambda w: (w + torch.rand_like(w)).sin().sum(),
    "its sum": lambda w: (w.sum() + torch.rand(9).sum()).exp(),
    "dropout": lambda w: F.dropout(F.dropout(w).sin().cumsum(0)).sin().sum(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_once(name: str) -> None:
    def make(wrap: Callable[..., Callable[..., Tensor]]) -> tuple[Tensor, list[Tensor]]:
        w = leaf(9)
        return wrap(RANDOM[name])(w), [w]

    agree(make)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_checkpoint_inside(p: float) -> None:
    """A region decides itself what is computed again, and draws no random number twice."""

    def make(wrap: Callable[..., Callable[..., Tensor]]) -> tuple[Tensor, list[Tensor]]:
        v, w = leaf(9), leaf(9, seed=1)

        def part(v: Tensor) -> Tensor:
            return F.dropout(v.sin() * w, p).exp()

        return wrap(lambda v: checkpoint(part, v, use_reentrant=False).sum())(v), [v, w]

    agree(make)


@pytest.mark.parametrize("around", [partial(checkpoint, use_reentrant=False), "hooks"])
def test_hooks_of_saved_tensors_around_a_region(around: Any) -> None:
    def make(wrap: Callable[..., Callable[..., Tensor]]) -> tuple[Tensor, list[Tensor]]:
        v, run = leaf(9), wrap(lambda v: v.sin().exp())
        if around != "hooks":
            return around(run, v).sum().sin(), [v]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
            return run(v).sum().sin(), [v]

    agree(make)


def test_gradients_that_are_differentiated_although_what_was_given_is_constant() -> None:
    """A penalty on the gradient of a whole loss is refused, not left out."""
    v = leaf(9)
    loss = compiled(lambda v: v.sin().sum())(v)
    (grad,) = torch.autograd.grad(loss, v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (v.sum() + grad.square().sum()).backward()


def test_two_threads_compile() -> None:
    models: list[Any] = [small(), small()]
    errors = []
    x, y = vectors(6)

    def train(model: Any) -> None:
        try:
            hesscale.backward(F.cross_entropy(model(x), y))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(compiled(model),)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p.curvature, q.curvature)


def read_and_overwritten(v: Tensor, w: Tensor, old: Tensor) -> Tensor:
    factor = old.exp()
    old.mul_(1.5)
    return (v * factor).sin().sum() + (w * old).exp().sum()


def test_inputs_that_are_read_and_written_to() -> None:
    """Twice: what is written by one call goes into the next."""

    def make(wrap: Callable[..., Callable[..., Tensor]]) -> tuple[Tensor, list[Tensor]]:
        v, w, old = leaf(9), leaf(9, seed=1), leaf(9, seed=2).detach()
        run = wrap(read_and_overwritten)
        hesscale.backward(run(v, w, old))
        return run(v, w, old) + old.sum(), [v, w]

    agree(make)


def test_parameters_that_are_written_to() -> None:
    def make(wrap: Callable[..., Callable[..., Tensor]]) -> tuple[Tensor, list[Tensor]]:
        v, w = leaf(9), leaf(9, seed=1)

        def loss_fn(v: Tensor, w: Tensor) -> Tensor:
            with torch.no_grad():
                v.clamp_(-0.5, 0.5)
            return (v * w).sin().sum()

        run = wrap(loss_fn)
        hesscale.backward(run(v, w))
        return run(v, w), [v, w]

    agree(make)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("which", ["view of an input", "view of an output", "output that has a view"])
def test_outputs_that_share_memory_and_are_written_to_later(which: str, backend: str) -> None:
    def make(wrap: Callable[..., Callable[..., Any]]) -> tuple[Tensor, list[Tensor]]:
        v = leaf(3, 4)

        def function(h: Tensor) -> tuple[Tensor, ...]:
            out = h * 3
            return h[:2], out, out.t()

        x = v * 2
        part, out, turned = wrap(function)(x)
        {"view of an input": part, "view of an output": turned, "output that has a view": out}[which].mul_(3)
        return part.sum() + x.pow(3).sum() + turned.sin().sum() + (out * out).sum(), [v]

    agree(make, backend)


def test_memory_that_is_shared_in_a_later_call() -> None:
    def function(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return (v * y).sum()

    run, v, x = compiled(function), leaf(3), leaf(3, seed=1).detach()
    run(v, x, leaf(3, seed=2).detach())
    with pytest.raises(RuntimeError, match="shares its memory"):
        run(v, x, x[:])
