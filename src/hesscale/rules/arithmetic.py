"""Element-wise functions of several variables: one pair (f', f'') per input, broadcasting undone by the family."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .calculus import number
from .families import Elementwise, Pair
from .table import register

Pairs = tuple[Pair, ...]
_NONE: Pair = (None, None)


def _real(x: Any) -> Any:
    """Integers as floating numbers, whose squares do not overflow; everything else as it is."""
    integers = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype is not torch.bool
    return x.double() if integers else x


def _precise(x: Any) -> Any:
    """The same in double precision if torch made it of a Python number: in arithmetic among themselves such tensors
    fall back to the default dtype, and a constant would be squared in single precision."""
    return x.clone().double() if x is not None and x.dim() == 0 and x.device.type == "cpu" else _real(x)


def add(node: Any) -> Pairs:
    """x + αy."""
    return (1.0, None), (node._saved_alpha, None)


def reversed_sub(node: Any) -> Pairs:
    """y − αx."""
    return (node._saved_alpha, None), (1.0, None)


def mul(node: Any) -> Pairs:
    """x·y."""
    return (number(_real(node._saved_other)), None), (number(_real(node._saved_self)), None)


def div(node: Any) -> Pairs:
    """x/y:  (1/y, 0),  (−x/y², 2x/y³)."""
    x, y = _precise(node._saved_self), _precise(node._saved_other)
    return (number(1 / y), None), _NONE if x is None else (number(-x / (y * y)), number(2 * x / y**3))


def rounded_div(node: Any) -> Pairs:
    """⌊x/y⌋ is flat; without a rounding mode it is x/y."""
    return div(node) if node._saved_rounding_mode is None else ((0.0, None), (0.0, None))


def power(node: Any) -> Pairs:
    """x^y:  (y x^(y−1), y(y−1) x^(y−2)),  (x^y log x, x^y log²x)."""
    x, y, result = _real(node._saved_self), _real(node._saved_exponent), node._saved_result
    return _power_base(x, y), _NONE if result is None else _power_exponent(x, result)


def _power_base(x: Tensor | None, y: Tensor) -> Pair:
    if x is None:
        return _NONE
    first = torch.where(y == 0, 0.0, y * x.pow(y - 1))
    return first, torch.where((y == 0) | (y == 1), 0.0, y * (y - 1) * x.pow(y - 2))


def _power_exponent(x: Tensor, result: Tensor) -> Pair:
    log = torch.where(x == 0, 0.0, x.log())  # 0^y is flat in y
    return result * log, result * log.square()


def atan2(node: Any) -> Pairs:
    """atan(y/x), r² = x² + y²:  (x/r², −2xy/r⁴),  (−y/r², 2xy/r⁴)."""
    y, x = _real(node._saved_self), _real(node._saved_other)
    r2 = x.square() + y.square()
    bend = 2 * (x / r2) * (y / r2)
    return (x / r2, -bend), (-y / r2, bend)


def hypot(node: Any) -> Pairs:
    """r = √(x² + y²):  (x/r, (1 − (x/r)²)/r), and the same in y."""
    r = node._saved_result
    # torch saves an input only if that input needs a gradient
    x, y = (None if t is None else _real(t) / r for t in (node._saved_self, node._saved_other))
    return _hypot(x, y, r), _hypot(y, x, r)


def _hypot(ratio: Tensor | None, other: Tensor | None, r: Tensor) -> Pair:
    if ratio is None:
        return _NONE
    return ratio, (1 - ratio.square() if other is None else other.square()) / r  # the same, but for rounding


def logaddexp(node: Any, base: float = math.e) -> Pairs:
    """log(b^x + b^y), p = σ((x − y) log b):  (p, p(1−p) log b),  (1−p, p(1−p) log b)."""
    gap = (node._saved_self - node._saved_other) * math.log(base)
    p, others = torch.sigmoid(gap), torch.sigmoid(-gap)
    bend = p * others * math.log(base)
    return (p, bend), (others, bend)


def xlogy(node: Any, shift: float = 0.0) -> Pairs:
    """x log(y + shift):  (log, 0),  (x/y, −x/y²)."""
    x, y = _real(node._saved_self), _real(node._saved_other)
    return (_log(y, x, shift), None), _xlogy_y(x, y, shift)


def _log(y: Tensor | float, x: Tensor | None, shift: float) -> Tensor:
    log = torch.as_tensor(y + shift).log()
    # 0·log(0) counts as 0, and as flat in x
    return log if x is None else torch.where((x == 0) & torch.as_tensor(y <= -shift), 0.0, log)


def _xlogy_y(x: Tensor | float | None, y: Tensor, shift: float) -> Pair:
    if x is None:
        return _NONE
    return x / (y + shift), -x / (y + shift).square()


def xlogy_scalar_x(node: Any, shift: float = 0.0) -> Pair:
    """x log(y + shift) in y alone."""
    return _xlogy_y(node._saved_self, node._saved_other, shift)


def xlogy_scalar_y(node: Any, shift: float = 0.0) -> Pair:
    """x log(y + shift) in x alone: linear."""
    x, log = node._saved_self, math.log(node._saved_other + shift)
    return torch.full_like(x, log).masked_fill(x == 0, 0.0) if math.isinf(log) else log, None


def larger(node: Any) -> Pairs:
    """max(x, y): the gradient goes to the larger one, half to each where they are equal."""
    return _share(node._saved_self, node._saved_other)


def smaller(node: Any) -> Pairs:
    """min(x, y)."""
    return _share(node._saved_other, node._saved_self)


def _share(x: Tensor, y: Tensor) -> Pairs:
    share = (x > y).to(x.dtype) + (x == y).to(x.dtype) / 2
    return (share, None), (1 - share, None)


def larger_f(node: Any) -> Pairs:
    """fmax(x, y): as max, all to x where they are equal."""
    return _mask(node._saved_self >= node._saved_other)


def smaller_f(node: Any) -> Pairs:
    """fmin(x, y)."""
    return _mask(node._saved_self <= node._saved_other)


def where(node: Any) -> Pairs:
    """x where the condition holds, else y."""
    return _mask(node._saved_condition)


def _mask(condition: Tensor) -> Pairs:
    return (condition, None), (~condition, None)


def clamp(node: Any) -> Pairs:
    """min(max(x, low), high)."""
    x, low, high = node._saved_self, node._saved_min, node._saved_max
    below = torch.zeros_like(x, dtype=torch.bool) if low is None else x < low
    above = torch.zeros_like(x, dtype=torch.bool) if high is None else x > high
    crossed = torch.zeros_like(below) if low is None or high is None else low > high  # then the result is `high`
    shares = (~(below | above | crossed), below & ~crossed, (above | crossed))
    return tuple((share, None) for share in shares)


def clamp_min(node: Any) -> Pairs:
    """max(x, low)."""
    return _mask(node._saved_self >= node._saved_min)


def clamp_max(node: Any) -> Pairs:
    """min(x, high)."""
    return _mask(node._saved_self <= node._saved_max)


def remainder(node: Any) -> Pairs:
    """x − y⌊x/y⌋."""
    return _modulo(node, "floor")


def fmod(node: Any) -> Pairs:
    """x − y·trunc(x/y)."""
    return _modulo(node, "trunc")


def _modulo(node: Any, rounding: str) -> Pairs:
    x, y = _real(node._saved_self), _real(node._saved_other)
    return (1.0, None), _NONE if x is None else (-torch.div(x, y, rounding_mode=rounding), None)


def lerp_scalar(node: Any) -> Pairs:
    """x + w(y − x)."""
    return (1 - node._saved_weight, None), (node._saved_weight, None)


def lerp(node: Any) -> Pairs:
    """x + w(y − x), w too a variable."""
    x, y, w = node._saved_self, node._saved_end, node._saved_weight
    return (1 - w, None), (w, None), _NONE if x is None or y is None else (y - x, None)


def addcmul(node: Any) -> Pairs:
    """x + c·y·z."""
    y, z, c = _real(node._saved_tensor1), _real(node._saved_tensor2), node._saved_value
    return (1.0, None), (None if z is None else c * z, None), (None if y is None else c * y, None)


def addcdiv(node: Any) -> Pairs:
    """x + c·y/z."""
    y, z, c = _real(node._saved_tensor1), _real(node._saved_tensor2), node._saved_value
    return (1.0, None), (c / z, None), _NONE if y is None else (-c * y / z.square(), 2 * c * y / z**3)


def copysign(node: Any) -> Pairs:
    """|x|·sign(y)."""
    x = node._saved_self
    return (None if x is None else torch.sgn(x) * torch.sgn(node._saved_result), None), (0.0, None)


def ldexp(node: Any) -> Pairs:
    """x·2^y:  (2^y, 0),  (x 2^y log 2, x 2^y log²2)."""
    y, result = node._saved_other, node._saved_result
    exponent = _NONE if result is None else (result * math.log(2), result * math.log(2) ** 2)
    return (torch.exp2(y) if y is not None else None, None), exponent


_SUM, _PRODUCT = ((0, 1),), ((0,), (1,))  # jointly linear; linear in each
register(Elementwise(add, linear=_SUM), "AddBackward0", "SubBackward0")
register(Elementwise(reversed_sub, linear=_SUM), "RsubBackward0")
register(Elementwise(mul, linear=_PRODUCT), "MulBackward0")
register(Elementwise(div, linear=((0,),)), "DivBackward0")
register(Elementwise(rounded_div), "DivBackward2")
register(Elementwise(power), "PowBackward1")
register(Elementwise(atan2), "Atan2Backward0")
register(Elementwise(hypot), "HypotBackward0")
register(Elementwise(logaddexp), "LogaddexpBackward0")
register(Elementwise(lambda node: logaddexp(node, 2.0)), "Logaddexp2Backward0")
register(Elementwise(xlogy, linear=((0,),)), "XlogyBackward0")
register(Elementwise(xlogy_scalar_x), "XlogyBackward1")
register(Elementwise(xlogy_scalar_y, linear=((0,),)), "XlogyBackward2")
register(Elementwise(lambda node: xlogy(node, 1.0), linear=((0,),)), "SpecialXlog1PyBackward0")
register(Elementwise(lambda node: xlogy_scalar_x(node, 1.0)), "SpecialXlog1PyBackward1")
register(Elementwise(lambda node: xlogy_scalar_y(node, 1.0), linear=((0,),)), "SpecialXlog1PyBackward2")
register(Elementwise(larger), "MaximumBackward0")
register(Elementwise(smaller), "MinimumBackward0")
register(Elementwise(larger_f), "FmaxBackward0")
register(Elementwise(smaller_f), "FminBackward0")
register(Elementwise(where, linear=_SUM), "WhereBackward0")
register(Elementwise(clamp), "ClampBackward0")
register(Elementwise(clamp_min), "ClampMinBackward1")
register(Elementwise(clamp_max), "ClampMaxBackward1")
register(Elementwise(remainder), "RemainderBackward1")
register(Elementwise(fmod), "FmodBackward1")
register(Elementwise(lerp_scalar, linear=_SUM), "LerpBackward0")
register(Elementwise(lerp, linear=((0, 1), (2,))), "LerpBackward1")
register(Elementwise(addcmul, linear=((0, 1), (0, 2))), "AddcmulBackward0")
register(Elementwise(addcdiv, linear=((0, 1),)), "AddcdivBackward0")
register(Elementwise(copysign), "CopysignBackward0")
register(Elementwise(ldexp, linear=((0,),)), "LdexpBackward0")
# x + c, c·x, x/c, c − x, −x
register(
    Elementwise(linear=((0,),)),
    "AddBackward1",
    "Deg2RadBackward0",
    "DivBackward1",
    "MulBackward1",
    "NegBackward0",
    "Rad2DegBackward0",
    "RsubBackward1",
    "SubBackward1",
)
