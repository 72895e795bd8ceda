"""Error functions and Bessel functions: (f', f''), by a series wherever the closed form subtracts equal numbers.

Few models have the scaled ones, so they are computed in double precision: what still cancels there leaves the digits of
a float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .families import Elementwise, Pair, unary
from .table import register

_HALF_SQRT_PI: Final = math.sqrt(math.pi) / 2
_FAR: Final = 8.0  # from here on the series of erfcx, from _FAR_BESSEL on those of I₀ and I₁, are exact to rounding
_FAR_BESSEL: Final = 20.0


def in_double(derivatives: Any) -> Elementwise:
    """The rule of an f whose ``derivatives(x)`` are computed in double precision, where a device has it."""

    def pair(node: Any) -> Pair:
        x = node._saved_self
        first, second = derivatives(x if x.device.type == "mps" else x.double())
        return first.to(x.dtype), second.to(x.dtype)

    return unary(pair)


def inverse_erf(x: Tensor) -> Pair:
    """y = erf⁻¹(x):  f' = √π/2 e^(y²),  f'' = 2y f'²."""
    y = torch.erfinv(x)
    first = _HALF_SQRT_PI * y.square().exp()
    return first, 2 * y * first.square()


def inverse_normal(node: Any) -> Pair:
    """y = Φ⁻¹(x):  f' = √(2π) e^(y²/2),  f'' = y f'²."""
    y = node._saved_result
    first = math.sqrt(2 * math.pi) * (y.square() / 2).exp()
    return first, y * first.square()


def erf(node: Any) -> Pair:
    """erf(x):  −4x/√π e^(−x²)."""
    x = node._saved_self
    return None, -2 * x * (-x.square()).exp() / _HALF_SQRT_PI


def erfc(node: Any) -> Pair:
    """1 − erf(x)."""
    x = node._saved_self
    return None, 2 * x * (-x.square()).exp() / _HALF_SQRT_PI


_TAIL: Final = [(-1) ** k * math.prod(range(1, 2 * k + 2, 2)) / 2**k for k in range(16)]


def scaled_erfc(x: Tensor) -> Pair:
    """e^(x²) erfc(x):  f' = 2xf − 2/√π,  f'' = 2f + 2xf';  far out, with t = 1/x² and c_k = (−1)^k (2k+1)!!/2^k,
    f' = −t/√π Σ c_k t^k  and  f'' = 2t/(x√π) Σ (k+1) c_k t^k."""
    y, beyond = torch.special.erfcx(x), x > _FAR
    first = 2 * x * y - 1 / _HALF_SQRT_PI
    second = 2 * y + 2 * x * first
    far = x.clamp_min(_FAR)
    t = far.square().reciprocal()
    far_first = t * _polynomial(t, _TAIL) * (-0.5 / _HALF_SQRT_PI)
    far_second = t / far * _polynomial(t, [(k + 1) * c for k, c in enumerate(_TAIL)]) / _HALF_SQRT_PI
    return torch.where(beyond, far_first, first), torch.where(beyond, far_second, second)


def log_normal(x: Tensor) -> Pair:
    """log Φ(x):  f' = φ(x)/Φ(x),  f'' = −f'(x + f');  for x < −1, with E = e^(z²) erfc(z) at z = −x/√2,
    f' = √(2/π)/E  and  f'' = f'E'/(√2 E)."""
    right = x.clamp(-1, 40)  # f' is zero long before 40
    first = (-right.square() / 2 - torch.special.log_ndtr(right)).exp() / math.sqrt(2 * math.pi)
    second = -first * (right + first)
    z = x.clamp_max(-1) * -math.sqrt(0.5)
    scaled = torch.special.erfcx(z)
    far_first = math.sqrt(2 / math.pi) / scaled
    far_second = far_first * scaled_erfc(z)[0] / (math.sqrt(2) * scaled)
    left = x < -1
    return torch.where(left, far_first, first), torch.where(left, far_second, second)


def bessel_i0(x: Tensor) -> Pair:
    """I₀(x):  f' = I₁,  f'' = I₀ − I₁/x."""
    first = torch.special.i1(x)
    return first, torch.special.i0(x) - _over(first, x, 0.5)


def bessel_i1(x: Tensor) -> Pair:
    """I₁(x):  f' = I₀ − I₁/x,  f'' = I₁ − I₂/x."""
    y, i0 = torch.special.i1(x), torch.special.i0(x)
    ratio = _over(y, x, 0.5)
    return i0 - ratio, y - torch.where(x.abs() < 1, _order_2_over_x(x, 1), (i0 - 2 * ratio) / x)


def bessel_j0(x: Tensor) -> Pair:
    """J₀(x):  f' = −J₁,  f'' = J₁/x − J₀."""
    j1 = torch.special.bessel_j1(x)
    return -j1, _over(j1, x, 0.5) - torch.special.bessel_j0(x)


def bessel_j1(x: Tensor) -> Pair:
    """J₁(x):  f' = J₀ − J₁/x,  f'' = J₂/x − J₁."""
    y, j0 = torch.special.bessel_j1(x), torch.special.bessel_j0(x)
    ratio = _over(y, x, 0.5)
    return j0 - ratio, torch.where(x.abs() < 1, _order_2_over_x(x, -1), (2 * ratio - j0) / x) - y


def bessel_y0(x: Tensor) -> Pair:
    """Y₀(x):  f' = −Y₁,  f'' = Y₁/x − Y₀."""
    y1 = torch.special.bessel_y1(x)
    return -y1, y1 / x - torch.special.bessel_y0(x)


def bessel_y1(x: Tensor) -> Pair:
    """Y₁(x):  f' = Y₀ − Y₁/x,  f'' = (2Y₁/x − Y₀)/x − Y₁."""
    y, y0 = torch.special.bessel_y1(x), torch.special.bessel_y0(x)
    return y0 - y / x, (2 * y / x - y0) / x - y


def bessel_k0(x: Tensor) -> Pair:
    """K₀(x):  f' = −K₁,  f'' = K₀ + K₁/x."""
    k1 = torch.special.modified_bessel_k1(x)
    return -k1, torch.special.modified_bessel_k0(x) + k1 / x


def bessel_k1(x: Tensor) -> Pair:
    """K₁(x):  f' = −K₀ − K₁/x,  f'' = K₁ + (K₀ + 2K₁/x)/x."""
    y, k0 = torch.special.modified_bessel_k1(x), torch.special.modified_bessel_k0(x)
    return -k0 - y / x, y + (k0 + 2 * y / x) / x


def scaled_bessel_i0(x: Tensor) -> Pair:
    """e^(−|x|) I₀(x), with i₁ = e^(−|x|) I₁:  f' = i₁ − sign(x) f,  f'' = 2f − 2 sign(x) i₁ − i₁/x."""
    y, i1, sign = torch.special.i0e(x), torch.special.i1e(x), x.sign()
    second = 2 * y - 2 * sign * i1 - _over(i1, x, 0.5)
    far_first, far_second = _scaled_bessel_far(x, 0)
    beyond = x.abs() > _FAR_BESSEL
    return torch.where(beyond, sign * far_first, i1 - sign * y), torch.where(beyond, far_second, second)


def scaled_bessel_i1(x: Tensor) -> Pair:
    """e^(−|x|) I₁(x), with i₀, i₂ alike:  f' = i₀ − f/x − sign(x) f,  f'' = 2f − 2 sign(x) (i₀ − f/x) − i₂/x."""
    y, i0, sign = torch.special.i1e(x), torch.special.i0e(x), x.sign()
    ratio = _over(y, x, 0.5)
    i2_over_x = torch.where(x.abs() < 1, _order_2_over_x(x, 1) * (-x.abs()).exp(), (i0 - 2 * ratio) / x)
    first, second = i0 - ratio - sign * y, 2 * y - 2 * sign * (i0 - ratio) - i2_over_x
    far_first, far_second = _scaled_bessel_far(x, 1)
    beyond = x.abs() > _FAR_BESSEL
    return torch.where(beyond, far_first, first), torch.where(beyond, sign * far_second, second)


def _order_2_over_x(x: Tensor, sign: int) -> Tensor:
    """I₂(x)/x (sign 1) or J₂(x)/x (−1) around zero:  x/4 Σ (± x²/4)^k / (k! (k+2)!)."""
    near = x.clamp(-1, 1)
    terms = [sign**k / (math.factorial(k) * math.factorial(k + 2)) for k in range(9)]
    return near / 4 * _polynomial(near.square() / 4, terms)


def _scaled_bessel_far(x: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """f' and f'' of e^(−x) I_n(x) at |x|, far out:  f = Σ b_k x^(−k−½)/√(2π), b_k = Π_{j≤k} ((2j−1)² − 4n²)/(8j)."""
    far = x.abs().clamp_min(_FAR_BESSEL)
    factors = [((2 * j - 1) ** 2 - 4 * order**2) / (8 * j) for j in range(1, 17)]
    terms = [math.prod(factors[:k]) / math.sqrt(2 * math.pi) for k in range(17)]
    first = -_polynomial(1 / far, [b * (k + 0.5) for k, b in enumerate(terms)]) * far**-1.5
    return first, _polynomial(1 / far, [b * (k + 0.5) * (k + 1.5) for k, b in enumerate(terms)]) * far**-2.5


def _polynomial(t: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Σ_k coefficients[k] t^k."""
    result = torch.full_like(t, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result.mul_(t).add_(coefficient)
    return result


def _over(numerator: Tensor, x: Tensor, limit: float) -> Tensor:
    """numerator/x, and ``limit`` at x = 0."""
    return torch.where(x == 0, limit, numerator / x)


register(in_double(inverse_erf), "ErfinvBackward0")
register(unary(inverse_normal), "SpecialNdtriBackward0")
register(unary(erf), "ErfBackward0")
register(unary(erfc), "ErfcBackward0")
register(in_double(scaled_erfc), "SpecialErfcxBackward0")
register(in_double(log_normal), "SpecialLogNdtrBackward0")
register(in_double(bessel_i0), "I0Backward0", "SpecialModifiedBesselI0Backward0")
register(in_double(bessel_i1), "SpecialI1Backward0", "SpecialModifiedBesselI1Backward0")
register(in_double(bessel_j0), "SpecialBesselJ0Backward0")
register(in_double(bessel_j1), "SpecialBesselJ1Backward0")
register(in_double(bessel_y0), "SpecialBesselY0Backward0")
register(in_double(bessel_y1), "SpecialBesselY1Backward0")
register(in_double(bessel_k0), "SpecialModifiedBesselK0Backward0")
register(in_double(bessel_k1), "SpecialModifiedBesselK1Backward0")
register(in_double(scaled_bessel_i0), "SpecialI0EBackward0")
register(in_double(scaled_bessel_i1), "SpecialI1EBackward0")
