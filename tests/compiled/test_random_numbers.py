"""What a region draws at random is drawn once, by its forward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hesscale
from hesscale.compiled.torch_compiler import functional

from .networks import compiled

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(F.gelu(F.dropout(x, 0.3)), 0.3).square().sum(),
    "noise of which the gradient keeps a function": lambda x: (x + torch.randn_like(x)).sin().sum(),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True).square().sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_curvature_is_of_the_numbers_that_were_drawn(name: str) -> None:
    x = torch.linspace(-1, 1, 50, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (FUNCTIONS[name], compiled(FUNCTIONS[name])):
        torch.manual_seed(0)
        hesscale.backward(function(x))
        found.append((x.grad, x.curvature))  # type: ignore[attr-defined]
        x.grad = x.curvature = None  # type: ignore[attr-defined]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_inductor_is_not_given_bernoulli() -> None:
    """Its loops may read that memory before the numbers are drawn: dropped attention was nan."""
    fake_mode = torch._subclasses.FakeTensorMode()
    with fake_mode:
        x = torch.empty(2, 3)
    graph = functional(lambda given, _: [F.dropout(given[0], 0.1)], fake_mode, [x], [], "inductor").graph
    assert not any("bernoulli" in str(node.target) for node in graph.nodes)
    assert any("rand" in str(node.target) for node in graph.nodes)
