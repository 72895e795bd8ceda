"""Random networks over [examples, time, units], sizes often equal: all columns are the exact Gauss-Newton diagonal.

Which element belongs to which example is inferred from shapes and nodes; where that is wrong, squares get cross terms.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hesscale

from .networks import flat
from .test_dial import assert_equal

Layer = Callable[[Tensor], Tensor]
CLASSES = 3


@dataclass
class Sizes:
    """Sizes, and the parameters that layers have asked for."""

    examples: int
    time: int
    units: int
    params: list[Tensor] = field(default_factory=list)

    def parameter(self, *shape: int) -> Tensor:
        self.params.append((0.7 * torch.randn(shape, dtype=torch.float64)).requires_grad_())
        return self.params[-1]

    def square(self) -> tuple[Tensor, Tensor]:
        return self.parameter(self.units, self.units), self.parameter(self.units)


def linear(it: Sizes, dim: int) -> Layer:
    w, b = it.square()
    return lambda x: F.linear(x, w, b)


def used_twice(it: Sizes, dim: int) -> Layer:
    w, b = it.square()
    return lambda x: F.linear(torch.tanh(F.linear(x, w, b)), w.t(), b)


def time_first(it: Sizes, dim: int) -> Layer:
    w, b = it.square()
    return lambda x: torch.tanh(F.linear(x.transpose(0, 1), w, b)).transpose(0, 1)


def normalized(it: Sizes, dim: int) -> Layer:
    w, b = it.parameter(it.units), it.parameter(it.units)
    return lambda x: F.layer_norm(x, (it.units,), w, b)


def convolution(it: Sizes, dim: int) -> Layer:
    w, b = it.parameter(it.units, it.units, 2), it.parameter(it.units)
    return lambda x: F.conv1d(F.pad(x.mT, (1, 0)), w, b).mT


def attention(it: Sizes, dim: int) -> Layer:
    w, _ = it.square()
    return lambda x: torch.bmm(torch.bmm(x @ w, x.mT).softmax(-1), x)


def mixing_time(it: Sizes, dim: int) -> Layer:
    w = it.parameter(it.time, it.time)
    return lambda x: w @ x


def mixing_examples(it: Sizes, dim: int) -> Layer:
    w = it.parameter(it.examples, it.examples)
    return lambda x: torch.einsum("nm,mtd->ntd", w, x)


def prelu(it: Sizes, dim: int) -> Layer:
    w = it.parameter(it.units)
    return lambda x: F.prelu(x.mT, w).mT


def with_parameter(combine: Callable[[Tensor, Tensor], Tensor], *dims: str) -> Callable[[Sizes, int], Layer]:
    """A parameter that is broadcast: of sizes by name, or one."""

    def layer(it: Sizes, dim: int) -> Layer:
        p = it.parameter(*(getattr(it, name, 1) for name in dims))
        return lambda x: combine(x, p)

    return layer


def plain(function: Callable[[Tensor, int], Tensor]) -> Callable[[Sizes, int], Layer]:
    return lambda it, dim: lambda x: function(x, dim)


LAYERS = (
    linear, used_twice, time_first, normalized, convolution, attention, mixing_time, mixing_examples, prelu,
    with_parameter(torch.add, "time", "units"),
    with_parameter(torch.mul, "units"),
    with_parameter(torch.mul, "one", "time", "one"),
    with_parameter(torch.mul),
    with_parameter(torch.sub, "examples", "time", "units"),
    plain(lambda x, dim: torch.tanh(x)),
    plain(lambda x, dim: 2 * x.softmax(dim)),
    plain(lambda x, dim: x.cumsum(dim)),
    plain(lambda x, dim: x + x.flip(dim)),
    plain(lambda x, dim: x + x.roll(1, dim) / 2),
    plain(lambda x, dim: x - x.mean(dim, keepdim=True) / 2),
    plain(lambda x, dim: x / (1 + x.std(dim, keepdim=True))),
    plain(lambda x, dim: F.normalize(x, dim=dim)),
    plain(lambda x, dim: torch.cat(x.chunk(2, -1)[::-1], -1)),
    plain(lambda x, dim: x + x[:, :1]),
    plain(lambda x, dim: F.group_norm(x.mT, 1).mT),
)  # fmt: skip

ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y.mean(1),
    "last": lambda y: y[:, -1],
    "tokens": lambda y: y.flatten(0, 1),
    "positions": lambda y: y.mT,
}


def exact(loss: Callable[[Tensor], Tensor], y: Tensor, params: list[Tensor]) -> Tensor:
    h = torch.autograd.functional.hessian(loss, y.detach()).reshape(y.numel(), y.numel())
    rows = [
        flat(torch.autograd.grad(entry, params, retain_graph=True, allow_unused=True, materialize_grads=True))
        for entry in y.reshape(-1)
    ]
    jacobian = torch.stack(rows)
    return torch.einsum("ki,kl,li->i", jacobian, h, jacobian)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("seed", range(25))
def test_all_columns_of_a_random_network(seed: int, end: str) -> None:
    draw = random.Random(f"{seed} {end}")
    torch.manual_seed(seed)
    it = Sizes(draw.choice([2, 3, 4]), draw.choice([2, 3, 4]), draw.choice([2, 4]))
    layers = [draw.choice(LAYERS)(it, draw.choice([0, 1, 1, 2, 2])) for _ in range(draw.randrange(2, 6))]
    head = it.parameter(CLASSES, it.units)
    y = torch.randn(it.examples, it.time, it.units, dtype=torch.float64)
    for layer in layers:
        y = layer(y)
    y = ENDS[end](F.linear(y, head))
    targets = torch.randint(CLASSES, y.select(1, 0).shape)

    def loss(y: Tensor) -> Tensor:
        return F.cross_entropy(y, targets)

    expected = exact(loss, y, it.params)
    found = hesscale.diagonal(loss(y), it.params, method="hesscale_gn", rank="full")
    zeros = (torch.zeros_like(p) if s is None else s for p, s in zip(it.params, found, strict=True))
    assert_equal(flat(zeros), expected, 1e-8)
