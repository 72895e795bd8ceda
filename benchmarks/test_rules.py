"""One node each of the kinds that most networks are made of: a pass with curvature over the node's own backward.

$ pytest benchmarks/test_rules.py --benchmark-columns=median,rounds

A limit is about twice what was measured with one thread: it catches a rule that became slow, not one that became a
little slower. Element-wise nodes and norms are above matrix products because their own backward is a single pass over
memory, whereas their rules make several, if in pieces that fit the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ratios import ratio
from torch import Tensor

import hesscale


@dataclass(frozen=True)
class Case:
    """One row of the table: an operation, the shapes of its inputs, and the most the ratio may be."""

    name: str
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    limit: float


def _cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(len(x)) % x.shape[1], reduction="none")


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


CASES = (
    Case("addmm", torch.addmm, ((512,), (128, 512), (512, 512)), 7),
    Case("convolution", functools.partial(F.conv2d, padding=1), ((32, 64, 16, 16), (96, 64, 3, 3), (96,)), 4),
    Case("tanh", torch.tanh, ((256, 4096),), 10),
    Case("relu", torch.relu, ((256, 4096),), 6),
    Case("gelu", F.gelu, ((256, 4096),), 9),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (512,), w, b), ((1024, 512), (512,), (512,)), 20),
    Case("batch_norm", _batch_norm, ((32, 64, 16, 16), (64,), (64,)), 20),
    Case("softmax", functools.partial(torch.softmax, dim=-1), ((1024, 512),), 18),
    Case("cross_entropy", _cross_entropy, ((1024, 512),), 12),
    Case("attention", F.scaled_dot_product_attention, ((4, 4, 128, 64),) * 3, 8),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fewer causes of noise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rule(case: Case, benchmark: Any) -> None:
    """The pass from a random gradient and a random curvature at the output."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in case.shapes]
    y = case.function(*inputs)
    g, s = torch.randn_like(y), torch.rand_like(y)

    def clear() -> None:
        for x in inputs:
            x.grad = x.curvature = None  # type: ignore[attr-defined]

    def plain() -> None:
        clear()
        y.backward(g, retain_graph=True)

    def with_curvature() -> None:
        clear()
        hesscale.backward(y, g, s, retain_graph=True)

    found = ratio(benchmark, with_curvature, plain, rounds=15)
    assert found is None or found <= case.limit
