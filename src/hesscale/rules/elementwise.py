"""Mathematical functions of one variable. Each gives (f', f''); f' = None leaves f' to torch's own backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .families import Elementwise, Pair, of_input, of_ratio, of_result, unary
from .table import register

_HALF_SQRT_PI = math.sqrt(math.pi) / 2

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
register(of_input(lambda x: x / (1 - x * x) ** 1.5), "AsinBackward0")
register(of_input(lambda x: -x / (1 - x * x) ** 1.5), "AcosBackward0")
register(of_input(lambda x: -2 * x / (1 + x * x).square()), "AtanBackward0")
register(of_input(torch.sinh), "SinhBackward0")
register(of_input(torch.cosh), "CoshBackward0")
register(of_ratio(0, -2, torch.ops.aten.tanh_backward.grad_input), "TanhBackward0")
register(of_input(lambda x: -x / (1 + x * x) ** 1.5), "AsinhBackward0")
register(of_input(lambda x: -x / (x * x - 1) ** 1.5), "AcoshBackward0")
register(of_input(lambda x: 2 * x / (1 - x * x).square()), "AtanhBackward0")

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


def inverse_erf(node: Any) -> Pair:
    """y = erf⁻¹(x):  f' = √π/2 e^(y²),  f'' = 2y f'²."""
    y = torch.erfinv(node._saved_self)
    first = _HALF_SQRT_PI * y.square().exp()
    return first, 2 * y * first.square()


def inverse_normal(node: Any) -> Pair:
    """y = Φ⁻¹(x):  f' = √(2π) e^(y²/2),  f'' = y f'²."""
    y = node._saved_result
    first = math.sqrt(2 * math.pi) * (y.square() / 2).exp()
    return first, y * first.square()


def log_normal(node: Any) -> Pair:
    """log Φ(x):  f' = φ(x)/Φ(x),  f'' = −f'(x + f')."""
    x = node._saved_self
    first = (-x.square() / 2 - node._saved_result).exp() / math.sqrt(2 * math.pi)
    return first, -first * (x + first)


def logit(node: Any) -> Pair:
    """log(x/(1−x)):  (2x−1)/(x(1−x))², and zero where eps has clamped x."""
    x, eps = node._saved_self, node._saved_eps
    second = (2 * x - 1) / (x * (1 - x)).square()
    return None, second if eps is None else second.masked_fill((x < eps) | (x > 1 - eps), 0.0)


def sinc(node: Any) -> Pair:
    """sin(πx)/(πx):  −(π sin(πx) + 2f')/x, by its series −π²/3 + π⁴x²/10 − π⁶x⁴/168 around zero."""
    x = node._saved_self
    angle = math.pi * x
    first = (angle.cos() - torch.sinc(x)) / x
    series = -(math.pi**2) / 3 + math.pi**4 * x**2 / 10 - math.pi**6 * x**4 / 168 + math.pi**8 * x**6 / 6480
    return None, torch.where(x.abs() < 0.02, series, -(math.pi * angle.sin() + 2 * first) / x)


def erf(node: Any) -> Pair:
    """erf(x):  −4x/√π e^(−x²)."""
    x = node._saved_self
    return None, -2 * x * (-x.square()).exp() / _HALF_SQRT_PI


def erfc(node: Any) -> Pair:
    """1 − erf(x)."""
    first, second = erf(node)
    return first, None if second is None else -second


def scaled_erfc(node: Any) -> Pair:
    """e^(x²) erfc(x):  f' = 2xf − 2/√π,  f'' = 2f + 2xf'."""
    x, y = node._saved_self, node._saved_result
    first = 2 * x * y - 1 / _HALF_SQRT_PI
    return first, 2 * y + 2 * x * first


def bessel_i0(node: Any) -> Pair:
    """I₀(x):  f' = I₁,  f'' = I₀ − I₁/x."""
    x = node._saved_self
    return None, torch.special.i0(x) - _over(torch.special.i1(x), x, 0.5)


def bessel_i1(node: Any) -> Pair:
    """I₁(x):  f' = I₀ − I₁/x,  f'' = I₁ − f'/x + I₁/x²."""
    x, y = node._saved_self, node._saved_result
    ratio = _over(y, x, 0.5)
    return None, y - _over(torch.special.i0(x) - 2 * ratio, x, 0.0)


def scaled_bessel_i0(node: Any) -> Pair:
    """e^(−|x|) I₀(x), with i₁ = e^(−|x|) I₁:  f'' = 2f − 2 sign(x) i₁ − i₁/x."""
    x, y = node._saved_self, node._saved_result
    i1 = torch.special.i1e(x)
    return None, 2 * y - 2 * x.sign() * i1 - _over(i1, x, 0.5)


def scaled_bessel_i1(node: Any) -> Pair:
    """e^(−|x|) I₁(x), with i₀ = e^(−|x|) I₀, t = sign(x) + 1/x:  f' = i₀ − ft,  f'' = f − sign(x) i₀ − f't + f/x²."""
    x, y = node._saved_self, node._saved_result
    i0, sign = torch.special.i0e(x), x.sign()
    first = i0 - y * (sign + 1 / x)
    second = y - sign * i0 - first * (sign + 1 / x) + y / x.square()
    return None, second.masked_fill(x == 0, 0.0)


def entropy(node: Any) -> Pair:
    """−x log x:  −1/x."""
    return None, -1 / node._saved_self


def _over(numerator: Tensor, x: Tensor, limit: float) -> Tensor:
    """numerator/x, and ``limit`` at x = 0."""
    return torch.where(x == 0, limit, numerator / x)


register(unary(power), "PowBackward0")
register(unary(exponential), "PowBackward2")
register(unary(polygamma), "PolygammaBackward0")
register(unary(multigamma), "MvlgammaBackward0")
register(unary(erf), "ErfBackward0")
register(unary(erfc), "ErfcBackward0")
register(unary(scaled_erfc), "SpecialErfcxBackward0")
register(unary(inverse_erf), "ErfinvBackward0")
register(unary(inverse_normal), "SpecialNdtriBackward0")
register(unary(log_normal), "SpecialLogNdtrBackward0")
register(unary(logit), "LogitBackward0")
register(unary(sinc), "SincBackward0")
register(unary(bessel_i0), "I0Backward0")
register(unary(bessel_i1), "SpecialI1Backward0")
register(unary(scaled_bessel_i0), "SpecialI0EBackward0")
register(unary(scaled_bessel_i1), "SpecialI1EBackward0")
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
