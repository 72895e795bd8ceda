"""What a graph would not do again, or would do otherwise, is refused, and nothing has changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hesscale

from .networks import assert_same, small, square, vectors


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: Tensor) -> Any:
        self.inner = self.inner[:1]
        return self.inner(x)


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.first = nn.Buffer(torch.ones(3, dtype=torch.float64))
        self.second = self.first

    def forward(self, x: Tensor) -> Any:
        self.second = self.second * 2
        return self.inner(x) * self.first


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: Tensor) -> Any:
        weight: Any = self.inner[0].weight
        weight.data = weight.data.clamp(-0.1, 0.1)
        return self.inner(x)


def with_backward(model: nn.Module, x: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    square(model, z).backward()
    return square(model, x)


def seeded(model: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return square(model, x + torch.randn_like(x))


def seeded_for_good(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return square(model, x)


def by_gradient(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) + sum((p * p.grad).sum() for p in model.parameters() if p.grad is not None)


def by_curvature(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) + sum((p.square() * p.curvature).sum() for p in model.parameters())  # type: ignore[attr-defined]


def clearing(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    return square(model, x)


def freezing(model: Any, x: Tensor) -> Tensor:
    model[0].weight.requires_grad_(False)
    return square(model, x)


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module], str]] = {
    "a module is replaced": (square, Replacing, "replaces the parameter or module 'inner'"),
    "a buffer of two names": (square, TwoNames, "the buffer 'second', which has a second name"),
    "data is set": (square, Clipped, "sets x.data"),
    "backward within": (with_backward, small, "runs backward"),
    "a seed within": (seeded, small, "seeds torch's random numbers"),
    "a seed that stays": (seeded_for_good, small, "seeds torch's random numbers"),
    "gradients are read": (by_gradient, small, "reads or clears the gradient"),
    "curvature is read": (by_curvature, small, "reads or clears the gradient or curvature"),
    "gradients are cleared": (clearing, small, "reads or clears the gradient"),
    "parameters are frozen": (freezing, small, "sets requires_grad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_not_do_again_is_refused(name: str) -> None:
    loss_fn, make, message = REFUSED[name]
    model, x = make(), vectors(6)[0]
    if name == "gradients are cleared":
        hesscale.backward(square(model, x))
    before, state = copy.deepcopy(model), torch.get_rng_state()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):  # deepcopy leaves these out
        q.grad, q.curvature = p.grad, getattr(p, "curvature", None)  # type: ignore[attr-defined]
    inner = dict(model.named_modules())
    with pytest.raises((RuntimeError, ValueError), match=message):
        hesscale.compile(loss_fn, model, backend="eager")(x)
    assert_same(model, before)
    assert all(p.requires_grad for p in model.parameters())
    assert dict(model.named_modules()) == inner
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_as_keys_are_refused() -> None:
    model, x = small(), vectors(6)[0]
    undecayed = {p for p in model.parameters() if p.dim() == 1}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) + sum(p.square().sum() for p in model.parameters() if p not in undecayed)

    with pytest.raises(ValueError, match="looks parameters up in a set or dict"):
        hesscale.compile(loss_fn, model, backend="eager")(x)


def test_an_optimizer_within_the_loss_is_refused() -> None:
    model, x = small(), vectors(6)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hesscale.backward(square(model, x))
    before = [p.grad for p in model.parameters()]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        return square(model, x)

    with pytest.raises(RuntimeError, match="reads or clears the gradient"):
        hesscale.compile(loss_fn, model, backend="eager")(x)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_memory_that_a_closure_shares_with_what_is_written_to_is_refused() -> None:
    model = nn.Sequential(small(), nn.BatchNorm1d(3).double())
    mean: Any = model[1].running_mean
    with pytest.raises(ValueError, match="shares its memory"):
        hesscale.compile(lambda m, x: (m(x) - mean).square().mean(), model, backend="eager")(vectors(6)[0])
    total = torch.ones(3, dtype=torch.float64)

    def loss_fn(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
        total[1:].add_(1)
        return (model(x) * weights).square().mean()

    step = hesscale.compile(loss_fn, small(), backend="eager")
    with pytest.raises(ValueError, match="shares its memory"):
        step(vectors(6)[0], total)
    assert total.tolist() == [1, 1, 1]
    step(vectors(6)[0], total.clone())
    assert total.tolist() == [1, 2, 2]


class Subclass(Tensor):
    pass


def test_tensors_of_other_kinds_are_refused() -> None:
    model, (x, _) = small(), vectors(6)
    negative = torch.randn(3, dtype=torch.complex128).conj().imag
    step = hesscale.compile(square, model, backend="eager")
    with pytest.raises(TypeError, match="is a Subclass"):
        step(x.as_subclass(Subclass))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="sparse or nested"):
        step(x.to_sparse())
    with pytest.raises(ValueError, match="conjugate or negative view"):
        hesscale.compile(lambda m, x: square(m, x) + negative.sum(), model, backend="eager")(x)
    model.register_buffer("negative", negative)
    with pytest.raises(ValueError, match="conjugate or negative view"):
        step(x)
    with pytest.raises(ValueError, match="pass one of the two"):
        hesscale.compile(square, small(), backend="eager", dynamic=True, rank=1)


def test_a_cache_that_was_filled_while_compiling_is_named() -> None:
    @functools.lru_cache
    def positions(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.float64)

    step = hesscale.compile(lambda m, x: (m(x) + positions(3)).square().mean(), small(), backend="eager")
    step(vectors(6)[0])
    with pytest.raises(RuntimeError, match="clear the cache, and fill it before"):
        step(vectors(5)[0])
    positions.cache_clear()
    positions(3)
    step(vectors(5)[0])
    step(vectors(4)[0])


def test_packed_sequences_are_refused_by_name() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True)
        return model(packed)[0].data.square().mean()  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="calls pack_padded_sequence"):
        hesscale.compile(loss_fn, nn.LSTM(4, 2, batch_first=True), backend="eager")(torch.randn(2, 3, 4))
