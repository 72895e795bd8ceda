"""Custom autograd.Functions and writes into slices: nodes that do not say what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hesscale
from hesscale.testing import exact_diagonal

from .case import constant, randn


class Gelu(torch.autograd.Function):
    """As in Bloom: a tanh form with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)) * grad


class BoundedSqrt(torch.autograd.Function):
    """As in RecurrentGemma: a square root whose derivative is bounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / torch.sqrt(torch.clip(4.0 * x, min=1 / 1000**2))


class Gate(torch.autograd.Function):
    """As in PhiMoE: each score feeds the one output of its row, with slopes that are data."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, multiplier: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        ctx.save_for_backward(multiplier, chosen, gates)
        return multiplier * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        multiplier, chosen, gates = ctx.saved_tensors
        flow = grad * multiplier
        return (gates * flow.mul(-1)).scatter_add(-1, chosen, flow), None, None, None


class RowSum(torch.autograd.Function):
    """Not element-wise: Σ over rows of x², as a function of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp().sum(-1).square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (2 * grad * x.exp().sum(-1)).unsqueeze(-1) * x.exp()


@pytest.mark.parametrize("rows", [3, 5000])  # the second is beyond what is gone through one by one
@pytest.mark.parametrize("function", [Gelu, BoundedSqrt])
def test_elementwise_functions_need_no_rule(function: Any, rows: int) -> None:
    x = constant(randn(rows, 4)).abs().add(0.1).requires_grad_()
    (found,) = hesscale.diagonal(function.apply(x).square().sum(), x, missing="exact")
    plain = {Gelu: lambda t: F.gelu(t, approximate="tanh"), BoundedSqrt: torch.sqrt}[function]
    (expected,) = hesscale.diagonal(plain(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elementwise_functions_in_half_precision(dtype: torch.dtype) -> None:
    x = constant(randn(7, 5)).abs().to(dtype).requires_grad_()
    (found,) = hesscale.diagonal(Gelu.apply(x).float().square().sum(), x, missing="exact")
    wide = x.detach().float().requires_grad_()
    (expected,) = hesscale.diagonal(F.gelu(wide, approximate="tanh").square().sum(), wide)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # the Function's own arithmetic is in half


def test_without_a_rule_the_error_says_so() -> None:
    with pytest.raises(hesscale.MissingRuleError, match=r"GeluBackward \(x1\).*missing='exact' for element-wise"):
        hesscale.backward(Gelu.apply(randn(3)).sum())


def test_a_function_of_rows_with_slopes_that_are_data() -> None:
    scores, gates = randn(2000, 4), constant(randn(2000, 4, seed=1)).softmax(-1)
    top, chosen = gates.max(-1, keepdim=True)
    y = Gate.apply(scores, top, chosen, gates)
    s = constant(randn(2000, 1, seed=2))
    (found,) = hesscale.diagonal(y, scores, torch.ones_like(s), s, missing="exact")
    slope = top * (F.one_hot(chosen.squeeze(-1), 4) - gates)
    torch.testing.assert_close(found, slope.square() * s, rtol=1e-10, atol=1e-10)


def test_what_is_not_elementwise_is_gone_through_or_refused() -> None:
    x = randn(3, 2)
    y = RowSum.apply(x)
    g, s = constant(randn(3, seed=1)), constant(randn(3, seed=2))
    offset = x.exp().sum(-1).square() - y.detach()
    expected = exact_diagonal((g * offset + s * offset.square() / 2).sum(), x)
    torch.testing.assert_close(hesscale.diagonal(y, x, g, s, missing="exact"), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(NotImplementedError, match=r"not element-wise.*10000 elements.*missing='sample'"):
        hesscale.backward(RowSum.apply(randn(5000, 2)).sum(), missing="exact")


class Once(torch.autograd.Function):
    """A Function whose backward must not be differentiated: its residual is unknown, not zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cos(ctx.saved_tensors[0]) * grad


@pytest.mark.parametrize("missing", ["exact", "sample"])
def test_what_is_differentiable_once_needs_a_rule(missing: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(NotImplementedError, match="OnceBackward is marked once_differentiable, so it needs a rule"):
        hesscale.backward(Once.apply(randn(3)).sum(), missing=missing, generator=generator)


class Two(torch.autograd.Function):
    """Two outputs; its backward counts on both gradients, as torch promises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x**2, x**3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * first + 3 * x**2 * second


class TwoOrNone(torch.autograd.Function):
    """The same, having asked for None in place of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x**2, x**3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if first is not None:
            raise AssertionError("torch would not call it so")
        return None if second is None else 3 * x**2 * second


@pytest.mark.parametrize("function", [Two, TwoOrNone])
@pytest.mark.parametrize("missing", ["exact", "sample"])
def test_an_unused_output_is_zeros(function: Any, missing: Any) -> None:
    x = randn(5)
    generator = torch.Generator().manual_seed(0)
    (found,) = hesscale.diagonal(function.apply(x)[1].sum(), x, missing=missing, generator=generator)
    torch.testing.assert_close(found, 6 * x.detach(), rtol=1e-10, atol=1e-10)


def written(x: Tensor, values: Tensor) -> Tensor:
    result = x.clone()
    result[:, 1] = values
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_writes_in_half_precision(dtype: torch.dtype) -> None:
    """Every slope is 0 or 1, so that even half precision has nothing to round."""
    x, v = (constant(randn(*shape)).to(dtype).requires_grad_() for shape in ((5, 7), (5,)))
    weights = torch.linspace(0.5, 2.0, 35).reshape(5, 7).to(dtype)
    found = hesscale.diagonal(written(x, v), (x, v), weights, weights)
    torch.testing.assert_close(found[1], weights[:, 1].float(), check_dtype=False)
    assert found[0] is not None
    assert torch.equal(found[0][:, 2:].float(), weights[:, 2:].float())
    assert not found[0][:, 1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_circular_padding_in_half_precision(dtype: torch.dtype) -> None:
    x = constant(randn(1, 2, 5)).to(dtype).requires_grad_()
    y = F.pad(x, (2, 1), mode="circular")
    (found,) = hesscale.diagonal(y, x, torch.ones_like(y), torch.ones_like(y))
    assert found is not None
    assert found[0, 0].tolist() == [2, 1, 1, 2, 2]


@pytest.mark.parametrize("size", [2, 3, 50])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_coupled_writes_are_refused(size: int, dtype: torch.dtype) -> None:
    def coupled(x: Tensor) -> Tensor:
        y = x.clone()
        y[0].cumsum_(0)
        return y

    x = constant(randn(2, size)).to(dtype).requires_grad_()
    with pytest.raises(NotImplementedError, match="not element-wise"):
        hesscale.backward(coupled(x).float().square().sum())
    assert x.grad is None


class Powers(torch.autograd.Function):
    """Two outputs that are both read: x² and x³."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x**2, x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0] + 3 * x**2 * grads[1]


@pytest.mark.parametrize("size", [3, 5000])  # the latter is too large to go through one by one
def test_several_outputs_are_transported_one_by_one(size: int) -> None:
    x = randn(size)
    u, v = Powers.apply(x)
    (found,) = hesscale.diagonal(u.square().sum() + v.square().sum(), x, missing="exact")
    x2, x3 = x.detach() ** 2, x.detach() ** 3
    transport = (2 * x.detach()) ** 2 * 2 + (3 * x2) ** 2 * 2
    torch.testing.assert_close(found, transport + 2 * (2 * x2) + 6 * x.detach() * (2 * x3), rtol=1e-10, atol=1e-10)
