"""Rows for element-wise functions of several variables, with broadcasting."""

import torch

from ..case import Case, between, constant, randn

a, b = randn(3, 4), randn(3, 4, seed=1)
row, column, scalar = randn(4, seed=2), randn(3, 1, seed=3), randn(seed=4)
p, q = between(0.3, 2.0, 3, 4), between(0.3, 2.0, 4, seed=1)
mask = constant(randn(3, 4, seed=7)) > 0

bytes_ = torch.tensor([[200, 3, 7, 16], [100, 255, 9, 1], [50, 60, 70, 80]], dtype=torch.uint8)

CASES = [
    Case("MulBackward0", torch.mul, a, bytes_, label="bytes"),
    Case("DivBackward0", torch.div, bytes_, p, label="bytes"),
    Case("AddcmulBackward0", torch.addcmul, a, b, bytes_, label="bytes"),
    Case("XlogyBackward0", torch.xlogy, bytes_, q, label="bytes"),
    # torch's own backward squares the bytes
    Case("Atan2Backward0", torch.atan2, a, bytes_, reference=lambda y, x: torch.atan2(y, x.to(y.dtype)), label="bytes"),
    Case("HypotBackward0", torch.hypot, a, constant(row), label="one"),
    Case("CopysignBackward0", torch.copysign, constant(a), row, label="sign-only"),
    Case("AddBackward0", torch.add, a, row),
    Case("AddBackward0", lambda x, y: torch.add(x, y, alpha=3), column, b, label="alpha"),
    Case("SubBackward0", lambda x, y: torch.sub(x, y, alpha=2), a, column),
    Case("RsubBackward0", lambda x, y: torch.rsub(x, y, alpha=2), a, row),
    Case("MulBackward0", torch.mul, a, row),
    Case("MulBackward0", torch.mul, scalar, b, label="scalar"),
    Case("MulBackward0", torch.mul, a, constant(row), label="constant"),
    Case("MulBackward0", lambda x: 0.3 * x, a, label="number"),
    Case("DivBackward0", lambda x: x / 3, a, label="number"),
    Case("DivBackward0", torch.div, a, q),
    Case("DivBackward0", torch.div, constant(a), q, label="denominator"),
    Case("DivBackward0", torch.div, column, constant(p), label="numerator"),
    Case("DivBackward2", lambda x, y: torch.div(x, y, rounding_mode="floor"), a, p),
    Case("DivBackward2", lambda x, y: torch.div(x, y, rounding_mode=None), a, p, label="true"),
    Case("PowBackward1", torch.pow, p, b),
    Case("PowBackward1", torch.pow, p, constant(b), label="base"),
    Case("PowBackward1", torch.pow, constant(p), row, label="exponent"),
    Case("Atan2Backward0", torch.atan2, a, row),
    Case("HypotBackward0", torch.hypot, a, row),
    Case("LogaddexpBackward0", torch.logaddexp, a, row),
    Case("Logaddexp2Backward0", torch.logaddexp2, a, column),
    Case("XlogyBackward0", torch.xlogy, a, q),
    Case("XlogyBackward0", torch.xlogy, constant(a), q, label="y"),
    Case("XlogyBackward1", lambda y: torch.xlogy(2.5, y), p),
    Case("XlogyBackward2", lambda x: torch.xlogy(x, 2.5), a),
    Case("SpecialXlog1PyBackward0", torch.special.xlog1py, a, q),
    Case("SpecialXlog1PyBackward1", lambda y: torch.special.xlog1py(2.5, y), p),
    Case("SpecialXlog1PyBackward2", lambda x: torch.special.xlog1py(x, 2.5), a),
    Case("MaximumBackward0", torch.maximum, a, row),
    Case("MinimumBackward0", torch.minimum, a, row),
    Case("FmaxBackward0", torch.fmax, a, row),
    Case("FminBackward0", torch.fmin, a, column),
    Case("WhereBackward0", lambda x, y: torch.where(mask, x, y), a, row),
    Case("WhereBackward0", lambda x: torch.where(mask, x, 0.0), column, label="one"),
    Case("ClampBackward0", torch.clamp, a, constant(row) - 1, constant(row) + 0.3),
    Case("ClampBackward0", torch.clamp, a, row, column, label="crossing"),
    Case("ClampMinBackward1", torch.clamp_min, a, row),
    Case("ClampMaxBackward1", torch.clamp_max, a, row),
    Case("RemainderBackward1", torch.remainder, a, q),
    Case("FmodBackward1", torch.fmod, a, q),
    Case("LerpBackward0", lambda x, y: torch.lerp(x, y, 0.3), a, row),
    Case("LerpBackward1", torch.lerp, a, row, column),
    Case("AddcmulBackward0", lambda x, y, z: torch.addcmul(x, y, z, value=2), a, row, column),
    Case("AddcdivBackward0", lambda x, y, z: torch.addcdiv(x, y, z, value=2), row, a, p),
    Case("CopysignBackward0", torch.copysign, a, row),
    Case("LdexpBackward0", torch.ldexp, a, row),
    Case("AddBackward1", lambda x: torch.ops.aten.add.Scalar(x, 2.0), a),
    Case("SubBackward1", lambda x: torch.ops.aten.sub.Scalar(x, 2.0), a),
    Case("MulBackward1", lambda x: torch.ops.aten.mul.Scalar(x, 2.5), a),
    Case("DivBackward1", lambda x: torch.ops.aten.div.Scalar(x, 2.5), a),
    Case("RsubBackward1", lambda x: 2.0 - x, a),
    Case("NegBackward0", torch.neg, a),
    Case("Deg2RadBackward0", torch.deg2rad, a),
    Case("Rad2DegBackward0", torch.rad2deg, a),
]
