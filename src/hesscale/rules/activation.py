"""Activation functions of torch.nn that are nodes of their own (tanh is in elementwise.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .calculus import added, sigmoid_slope
from .families import Coupled, Elementwise, Pair, Ratio, Selection, of_ratio, signed, unary
from .table import register

register(of_ratio(1, -2, torch.ops.aten.sigmoid_backward.grad_input), "SigmoidBackward0")


def log_sigmoid(node: Any) -> Pair:
    """log σ(x):  −σ(1 − σ)."""
    return None, sigmoid_slope(node._saved_self).neg_()


def softplus(node: Any) -> Pair:
    """log(1 + e^(βx))/β:  β σ(βx)(1 − σ(βx)), and zero where torch returns x itself."""
    x, beta = node._saved_self, node._saved_beta
    return None, (beta * sigmoid_slope(beta * x)).masked_fill(beta * x > node._saved_threshold, 0.0)


def elu(node: Any) -> Ratio:
    """c·α(e^(kx) − 1) for x ≤ 0:  f''/f' = k there; SELU is ELU with another c and α."""
    x = node._saved_self
    return 0, node._saved_input_scale, (x <= 0).to(x.dtype)


def elu_in_place(node: Any) -> Pair:
    """ELU from its result y = c·α(e^(kx) − 1):  k²(y + c·α)."""
    y = node._saved_result
    second = node._saved_input_scale**2 * (y + node._saved_scale * node._saved_alpha)
    return None, second.masked_fill(y > 0, 0.0)


def celu(node: Any) -> Pair:
    """α(e^(x/α) − 1) for x ≤ 0:  e^(x/α)/α."""
    x, alpha = node._saved_self, node._saved_alpha
    return None, ((x / alpha).clamp_max(0).exp() / alpha).masked_fill(x > 0, 0.0)


def celu_in_place(node: Any) -> Pair:
    """CELU from its result y:  (y + α)/α²."""
    y, alpha = node._saved_result, node._saved_alpha
    return None, ((y + alpha) / alpha**2).masked_fill(y > 0, 0.0)


def gelu(node: Any) -> Pair:
    """xΦ(x):  Φ(x) + xφ(x)  and  φ(x)(2 − x²), or the tanh form's."""
    x = node._saved_self.clamp(-100, 100)  # f'' is zero long before, and x³ must not overflow
    if node._saved_approximate == "tanh":
        return _gelu_tanh(x)
    square = x * x
    density = (square * -0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    first = (x * math.sqrt(0.5)).erf_().add_(1).mul_(0.5).addcmul_(x, density)
    return first, density.mul_(square.neg_().add_(2))


def _gelu_tanh(x: Tensor) -> Pair:
    """xσ, σ = σ(u), u = 2k(x + cx³):  σ + xσ'u'  and  σ'(2u' + x(u'' + (1 − 2σ)u'²)), σ' = σ(1 − σ)."""
    k, c = 2 * math.sqrt(2 / math.pi), 0.044715
    square = x.square()
    u = k * x * (1 + c * square)
    first, second = k * (1 + 3 * c * square), 6 * k * c * x
    sigma, others = torch.sigmoid(u), torch.sigmoid(-u)
    slope = sigma * others
    return sigma + x * slope * first, slope * (2 * first + x * (second + (others - sigma) * first.square()))


def silu(node: Any) -> Pair:
    """xσ(x):  σ + xσ(1 − σ)  and  σ(1 − σ)(2 + x(1 − 2σ))."""
    x = node._saved_self
    sigma, slope = torch.sigmoid(x), sigmoid_slope(x)
    first = torch.addcmul(sigma, x, slope)
    return first, sigma.mul_(-2).add_(1).mul_(x).add_(2).mul_(slope)


def mish(node: Any) -> Pair:
    """x·w, w = tanh(softplus(x)):  w + x(1 − w²)σ  and  (1 − w²)σ(2 + x(1 − σ) − 2xwσ)."""
    x = node._saved_self
    sigma, softplus = torch.sigmoid(x), torch.nn.functional.softplus(x)
    w = softplus.tanh()
    slope = sigma / softplus.cosh().square()  # 1 − tanh² keeps no digits where tanh is close to one
    return w + x * slope, slope * (2 + x * (1 - sigma) - 2 * x * w * sigma)


def hardswish(node: Any) -> Pair:
    """x(x + 3)/6 on (−3, 3):  1/3 there."""
    x = node._saved_self
    return None, (x.abs() < 3).to(x.dtype) / 3


def prelu(node: Any) -> tuple[Pair, Pair]:
    """x for x > 0, else wx."""
    x, w = node._saved_self, node._saved_weight
    positive = x > 0
    return (torch.where(positive, 1.0, w), None), (x.masked_fill(positive, 0.0), None)


def glu(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor:
    """a·σ(b) for the halves a and b of one input:  σ²s,  and  (aσ')²s + aσ''g."""
    dim = signed(node._saved_dim)
    a, b = node._saved_self.chunk(2, dim)
    sigma, slope = torch.sigmoid(b), sigmoid_slope(b)
    first = torch.zeros_like(a) if s is None else sigma.square() * s
    transport = None if s is None else (a * slope).square() * s
    residual = None if g is None else a * slope * (1 - 2 * sigma) * g
    second = added(transport, residual)
    return torch.cat([first, torch.zeros_like(b) if second is None else second], dim)


register(unary(log_sigmoid), "LogSigmoidBackward0")
register(unary(softplus), "SoftplusBackward0")
register(Elementwise(ratio=elu), "EluBackward0")
register(unary(elu_in_place), "EluBackward1")
register(unary(celu), "CeluBackward0")
register(unary(celu_in_place), "CeluBackward1")
register(unary(gelu), "GeluBackward0")
register(unary(silu), "SiluBackward0")
register(unary(mish), "MishBackward0")
register(unary(hardswish), "HardswishBackward0")
register(Elementwise(prelu, linear=((1,),)), "PreluKernelBackward0")
register(Coupled(glu), "GluBackward0")
register(
    Elementwise(),
    "HardsigmoidBackward0",
    "LeakyReluBackward0",
    "LeakyReluBackward1",
    "RreluWithNoiseBackward0",
    "RreluWithNoiseBackward1",
)
register(
    Selection(linear=False, pointwise=True),  # slopes of 0 and 1 only
    "HardshrinkBackward0",
    "HardtanhBackward0",
    "ReluBackward0",
    "SoftshrinkBackward0",
    "ThresholdBackward0",
    "ThresholdBackward1",
)
register(Elementwise(linear=((0,),)), "NativeDropoutBackward0")
