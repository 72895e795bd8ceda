"""Mathematical functions of one variable. Each gives (f', f''); f' = None leaves f' to torch's own backward."""

from __future__ import annotations

import math
from typing import Any

import torch

from .families import Elementwise, Pair, of_input, of_ratio, of_result, unary
from .table import register

# exponentials, logarithms and roots
register(of_ratio(1, 0), "ExpBackward0")
register(of_result(lambda y: y * math.log(2) ** 2), "Exp2Backward0")
register(of_result(lambda y: y + 1), "Expm1Backward0")
register(of_input(lambda x: -1 / x.square()), "LogBackward0")
register(of_input(lambda x: -1 / (x.square() * math.log(2))), "Log2Backward0")
register(of_input(lambda x: -1 / (x.square() * math.log(10))), "Log10Backward0")
register(of_input(lambda x: -1 / (1 + x).square()), "Log1PBackward0")
register(of_result(lambda y: -1 / (4 * y**3)), "SqrtBackward0")
register(of_result(lambda y: 0.75 * y**5), "RsqrtBackward0")
register(of_result(lambda y: 2 * y**3), "ReciprocalBackward0")

# trigonometric and hyperbolic functions
register(of_input(lambda x: -x.sin()), "SinBackward0")
register(of_input(lambda x: -x.cos()), "CosBackward0")
register(of_result(lambda y: 2 * y * (1 + y * y)), "TanBackward0")
register(of_input(lambda x: x / ((1 - x) * (1 + x)) ** 1.5), "AsinBackward0")
register(of_input(lambda x: -x / ((1 - x) * (1 + x)) ** 1.5), "AcosBackward0")
register(of_input(lambda x: -2 * x / (1 + x * x).square()), "AtanBackward0")
register(of_input(torch.sinh), "SinhBackward0")
register(of_input(torch.cosh), "CoshBackward0")
register(of_ratio(0, -2, torch.ops.aten.tanh_backward.grad_input), "TanhBackward0")
register(of_input(lambda x: -x / (1 + x * x) ** 1.5), "AsinhBackward0")
register(of_input(lambda x: -x / ((x - 1) * (x + 1)) ** 1.5), "AcoshBackward0")
register(of_input(lambda x: 2 * x / ((1 - x) * (1 + x)).square()), "AtanhBackward0")

# gamma functions
register(of_input(lambda x: torch.polygamma(1, x)), "LgammaBackward0")
register(of_input(lambda x: torch.polygamma(2, x)), "DigammaBackward0")


def power(node: Any) -> Pair:
    """x^p:  p(p−1) x^(p−2), which is zero for p = 0 and 1 even where x is zero."""
    p = node._saved_exponent
    return None, None if p in (0, 1) else p * (p - 1) * node._saved_self.pow(p - 2)


def exponential(node: Any) -> Pair:
    """b^x:  (log b)² b^x."""
    return None, node._saved_result * math.log(node._saved_self) ** 2


def polygamma(node: Any) -> Pair:
    """ψ⁽ⁿ⁾(x):  ψ⁽ⁿ⁺²⁾(x)."""
    return None, torch.polygamma(node._saved_n + 2, node._saved_self)


def multigamma(node: Any) -> Pair:
    """log Γ_p(x) = const + Σ_j log Γ(x − j/2):  Σ_j ψ⁽¹⁾(x − j/2), j < p."""
    halves = torch.arange(node._saved_p, device=node._saved_self.device) / 2
    return None, torch.polygamma(1, node._saved_self.unsqueeze(-1) - halves).sum(-1)


def logit(node: Any) -> Pair:
    """log(x/(1−x)):  (2x−1)/(x(1−x))², and zero where eps has clamped x."""
    x, eps = node._saved_self, node._saved_eps
    second = (2 * x - 1) / (x * (1 - x)).square()
    return None, second if eps is None else second.masked_fill((x < eps) | (x > 1 - eps), 0.0)


def sinc(node: Any) -> Pair:
    """sin(a)/a, a = πx:  f' = (cos a − f)/x,  f'' = −(π sin a + 2f')/x, and by their series around zero."""
    x = node._saved_self
    rest = math.pi * (x - 2 * (x / 2).round())  # a but for full turns, which single precision would not leave out
    sine = rest.sin()
    first = (rest.cos() - sine / (math.pi * x)) / x
    second = -(math.pi * sine + 2 * first) / x
    near, small = x.abs() < 0.15, (math.pi * x.clamp(-0.15, 0.15)).square()
    series = [sum(c * small**k for k, c in enumerate(terms)) for terms in (_SINC_FIRST, _SINC_SECOND)]
    return torch.where(near, series[0] * x, first), torch.where(near, series[1], second)


# of Σ (−1)^k (πx)^(2k)/(2k+1)!, differentiated once (and divided by x) and twice
_SINC_FIRST = [math.pi**2 * (-1) ** k * 2 * k / math.factorial(2 * k + 1) for k in range(1, 8)]
_SINC_SECOND = [c * (2 * k - 1) for k, c in enumerate(_SINC_FIRST, 1)]


def entropy(node: Any) -> Pair:
    """−x log x:  −1/x."""
    return None, -1 / node._saved_self


register(unary(power), "PowBackward0")
register(unary(exponential), "PowBackward2")
register(unary(polygamma), "PolygammaBackward0")
register(unary(multigamma), "MvlgammaBackward0")
register(unary(logit), "LogitBackward0")
register(unary(sinc), "SincBackward0")
register(unary(entropy), "SpecialEntrBackward0")

# piecewise linear
register(
    Elementwise(),
    "AbsBackward0",
    "AngleBackward0",
    "CeilBackward0",
    "ClampBackward1",
    "ClampMaxBackward0",
    "ClampMinBackward0",
    "CopysignBackward1",
    "FloorBackward0",
    "FmodBackward0",
    "FracBackward0",
    "FrexpBackward0",
    "NanToNumBackward0",
    "RemainderBackward0",
    "RoundBackward0",
    "RoundBackward1",
    "SgnBackward0",
    "SignBackward0",
    "TruncBackward0",
)
