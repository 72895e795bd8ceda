"""Half precision: curvature is computed in float32, whatever the dtype of an operation, its inputs or its operands."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale

HALF = (torch.float16, torch.bfloat16)


def curvature_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (found,) = hesscale.diagonal(function(x), x)
    assert found is not None
    return found


def test_an_operand_in_half_precision_is_squared_in_single() -> None:
    gain = nn.Parameter(torch.ones(2))
    operand = torch.tensor([[1e-4, 300.0]], dtype=torch.float16)
    hesscale.backward((gain * operand).pow(2).sum())
    torch.testing.assert_close(gain.curvature, 2 * operand[0].float().square(), rtol=1e-6, atol=0)


WIDE = torch.tensor([3e-4, 1e-3, 1.0, 300.0])  # squares span what float16 does not
OPERANDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, h: x * h,
    "div": lambda x, h: x / h,
    "addcmul": lambda x, h: torch.addcmul(torch.ones_like(x), x, h),
    "addcdiv": lambda x, h: torch.addcdiv(torch.ones_like(x), x, h),
    "lerp": lambda x, h: torch.ones_like(x) + h * (x - 1),
    "region": lambda x, h: x * torch.sigmoid(x) * h,
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("function", OPERANDS.values(), ids=OPERANDS)
def test_float32_times_half(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    operand, x = WIDE.to(dtype), torch.tensor([0.5, -1.0, 2.0, 0.1], requires_grad=True)
    exact = x.detach().double().requires_grad_()
    ours = curvature_of(lambda x: function(x, operand).pow(2).sum(), x)
    theirs = curvature_of(lambda x: function(x, operand.double()).pow(2).sum(), exact)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=0)


SEEDS = torch.tensor([1e-7, 3.3e-4, 1.2345678, 987.654, 2e5, 0.1])
LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(0),
    "cumsum to float32": lambda x: x.cumsum(0, dtype=torch.float32),
    "nansum": lambda x: x.reshape(2, 3).nansum(0),
    "nansum to float32": lambda x: x.reshape(2, 3).nansum(0, dtype=torch.float32),
    "sum to float32": lambda x: x.reshape(2, 3).sum(0, dtype=torch.float32),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "amax": lambda x: x.reshape(2, 3).amax(0),
    "copy_": lambda x: torch.zeros(6).copy_(x),
    "slice write": lambda x: _written(torch.zeros(8), x),
    "cat": lambda x: torch.cat([x, x.detach()]),
    "index": lambda x: x[torch.tensor([0, 2, 2, 5])],
    "prod to float32": lambda x: x.reshape(3, 2).prod(1, dtype=torch.float32),
    "cumprod to float32": lambda x: x.cumprod(0, dtype=torch.float32),
}


def _written(base: Tensor, x: Tensor) -> Tensor:
    base[1:7] = x
    return base


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("function", LINEAR.values(), ids=LINEAR)
def test_curvature_keeps_its_digits_on_the_way_through_half(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = torch.tensor([0.5, -1.0, 2.0, 0.125, 1.5, -0.75], dtype=dtype, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    found = []
    for variable in (x, exact):
        y = function(variable)
        seed = SEEDS.to(torch.float64 if variable is exact else torch.float32).repeat(2)[: y.numel()].reshape(y.shape)
        found.append(hesscale.diagonal(y, variable, torch.zeros_like(y), seed)[0])
    assert found[0].dtype is torch.float32
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_zero_curvature_is_in_single_precision_too(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    hesscale.backward(model(torch.ones(1, 3, dtype=dtype)).sum())
    assert all(p.curvature.dtype is torch.float32 and not p.curvature.any() for p in model.parameters())
    (found,) = hesscale.diagonal(model(torch.ones(1, 3, dtype=dtype)).sum(), model.weight)
    assert found is not None and found.dtype is torch.float32


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_circular_padding(dtype: torch.dtype) -> None:
    x = torch.randn(1, 1, 5, dtype=dtype, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    found = [hesscale.diagonal(F.pad(v, (2, 2), mode="circular").pow(2).sum(), v)[0] for v in (x, exact)]
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-5, atol=0)


GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "indexing": lambda x: x[torch.zeros(3000, dtype=torch.long)],
    "take": lambda x: x.take(torch.zeros(3000, dtype=torch.long)),
    "replicated padding": lambda x: F.pad(x.reshape(1, 1, 4), (1500, 1500), mode="replicate"),
    "overlapping maxima": lambda x: F.max_pool1d(F.pad(x.reshape(1, 1, 4), (800, 800)), 800, 1),
    "running maxima": lambda x: x.flip(0).cummax(0)[0].repeat(750),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", GATHERED.values(), ids=GATHERED.keys())
def test_many_readers_of_one_element_are_added_in_single_precision(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = torch.arange(1.0, 5.0, dtype=dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, z = function(x), function(exact)
    s = torch.rand(y.shape, generator=torch.Generator().manual_seed(0))
    (found,) = hesscale.diagonal(y, x, gradient=torch.zeros_like(y), curvature=s)
    (expected,) = hesscale.diagonal(z, exact, gradient=torch.zeros_like(z), curvature=s.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
