"""Rules on shapes, strides and broadcasts that nobody thought of: hypothesis draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hesscale.testing import check_rule

sizes = st.integers(1, 3)
seeds = st.integers(0, 2**16)


def tensor(shape: list[int], seed: int, low: float = 0.3, high: float = 1.7) -> Tensor:
    """Numbers of an interval, in an order of dimensions and with gaps that the seed picks."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(shape), generator=generator).tolist()
    stored = [shape[dim] for dim in order]
    gap = 1 + seed % 2
    values = torch.rand([*stored[:-1], stored[-1] * gap] if shape else [], generator=generator, dtype=torch.float64)
    values = values[..., ::gap] if shape else values
    back = [order.index(dim) for dim in range(len(shape))]
    return (low + (high - low) * values).permute(back).requires_grad_()


@st.composite
def broadcastable(draw: st.DrawFn, count: int = 2) -> list[list[int]]:
    """Shapes that broadcast with each other: some dimensions of one are missing or of length one."""
    full = draw(st.lists(sizes, min_size=0, max_size=3))
    shapes = []
    for _ in range(count):
        kept = [draw(st.sampled_from([size, 1])) for size in full]
        shapes.append(kept[draw(st.integers(0, len(kept))) :])
    return shapes


@pytest.mark.parametrize(
    "function",
    [torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.atan2, torch.hypot, torch.logaddexp, torch.xlogy],
)
@given(shapes=broadcastable(), seed=seeds)
def test_binary(function: Callable[..., Tensor], shapes: list[list[int]], seed: int) -> None:
    check_rule(function, tensor(shapes[0], seed), tensor(shapes[1], seed + 1))


@pytest.mark.parametrize("function", [torch.lerp, torch.addcmul, torch.addcdiv])
@given(shapes=broadcastable(3), seed=seeds)
def test_ternary(function: Callable[..., Tensor], shapes: list[list[int]], seed: int) -> None:
    check_rule(function, *(tensor(shape, seed + i) for i, shape in enumerate(shapes)))


@pytest.mark.parametrize("function", [torch.tanh, F.gelu, F.elu, torch.exp, torch.sqrt, F.softplus, F.relu, torch.abs])
@given(shape=st.lists(sizes, max_size=4), seed=seeds)
def test_unary(function: Callable[..., Tensor], shape: list[int], seed: int) -> None:
    check_rule(function, tensor(shape, seed))


@given(batch=broadcastable(), rows=sizes, inner=sizes, columns=sizes, seed=seeds)
def test_matmul(batch: list[list[int]], rows: int, inner: int, columns: int, seed: int) -> None:
    check_rule(torch.matmul, tensor([*batch[0], rows, inner], seed), tensor([*batch[1], inner, columns], seed + 1))


@given(batch=st.lists(sizes, max_size=2), features=sizes, outputs=sizes, bias=st.booleans(), seed=seeds)
def test_linear(batch: list[int], features: int, outputs: int, bias: bool, seed: int) -> None:
    inputs = [tensor([*batch, features], seed), tensor([outputs, features], seed + 1)]
    check_rule(F.linear, *inputs, *([tensor([outputs], seed + 2)] if bias else []))


@given(
    dims=st.integers(1, 3),
    groups=st.integers(1, 2),
    channels=st.tuples(sizes, sizes),
    kernel=st.integers(1, 3),
    options=st.fixed_dictionaries({"stride": sizes, "padding": st.integers(0, 2), "dilation": st.integers(1, 2)}),
    transposed=st.booleans(),
    seed=seeds,
)
def test_convolution(
    dims: int,
    groups: int,
    channels: tuple[int, int],
    kernel: int,
    options: dict[str, int],
    transposed: bool,
    seed: int,
) -> None:
    lengths = [options["dilation"] * (kernel - 1) + 1 + i for i in range(dims)]
    if transposed:
        lengths = [length + 2 * options["padding"] for length in lengths]
    inputs = tensor([2, groups * channels[0], *lengths], seed)
    weights = [channels[0] * groups, channels[1]] if transposed else [channels[1] * groups, channels[0]]
    function = getattr(F, f"conv{'_transpose' if transposed else ''}{dims}d")
    weight, bias = tensor([*weights, *[kernel] * dims], seed + 1), tensor([channels[1] * groups], seed + 2)
    check_rule(lambda x, w, b: function(x, w, b, groups=groups, **options), inputs, weight, bias)


@pytest.mark.parametrize("name", ["sum", "mean", "var", "std", "logsumexp", "prod", "amax", "norm"])
@given(shape=st.lists(st.integers(2, 3), min_size=1, max_size=3), keepdim=st.booleans(), data=st.data(), seed=seeds)
def test_reduction(name: str, shape: list[int], keepdim: bool, data: st.DataObject, seed: int) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    options: dict[str, Any] = {"p": 2.5} if name == "norm" else {}
    check_rule(lambda x: getattr(x, name)(dim=dim, keepdim=keepdim, **options), tensor(shape, seed))


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@given(shape=st.lists(sizes, min_size=1, max_size=3), data=st.data(), seed=seeds)
def test_softmax(function: Callable[..., Tensor], shape: list[int], data: st.DataObject, seed: int) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    check_rule(lambda x: function(x, dim), tensor(shape, seed))
