"""Rows for linear algebra: closed forms, and decompositions that are differentiated element by element."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..case import Case, between, constant, randn

A, B, v = randn(3, 3), randn(3, 2, seed=1), randn(3, seed=2)
with torch.no_grad():
    A += 3 * torch.eye(3)
pair = randn(2, 3, 3)
with torch.no_grad():
    pair += 3 * torch.eye(3)
lower = constant(A).tril().requires_grad_()
solve, triangle = torch.linalg.solve, torch.linalg.solve_triangular


def quietly(function: Any) -> Any:
    """A function that torch calls deprecated."""

    def call(*tensors: Tensor) -> Any:
        with warnings.catch_warnings(action="ignore"):
            return function(*tensors)

    return call


P = constant(A @ A.mT + torch.eye(3)).requires_grad_()
reflectors, scales = constant(torch.geqrf(constant(A))[0]), constant(torch.geqrf(constant(A))[1])
factors, pivots = (constant(t) for t in torch.linalg.lu_factor(constant(A)))
grid, grid3 = between(-0.8, 0.8, 1, 2, 2, 2), between(-0.8, 0.8, 1, 1, 2, 2, 3)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


CASES = [
    Case("LinalgInvExBackward0", torch.linalg.inv, pair),
    Case("LinalgSolveExBackward0", solve, A, B),
    Case("LinalgSolveExBackward0", solve, A, v, label="vector"),
    Case("LinalgSolveExBackward0", lambda a, b: solve(a, b, left=False), A, randn(2, 3), label="right"),
    Case("LinalgSolveTriangularBackward0", lambda a, b: triangle(a, b, upper=False), A, B, label="lower"),
    Case(
        "LinalgSolveTriangularBackward0",
        lambda a, b: triangle(a, b, upper=True, unitriangular=True),
        A,
        B,
        label="unit",
    ),
    Case(
        "LinalgSolveTriangularBackward0",
        lambda a, b: triangle(a, b, upper=True, left=False),
        A,
        randn(2, 3),
        label="right",
    ),
    Case("LinalgDetBackward0", torch.linalg.det, pair),
    Case("LinalgSlogdetBackward0", lambda t: torch.linalg.slogdet(t)[1], pair),
    Case("LinalgCrossBackward0", torch.linalg.cross, randn(2, 3), randn(1, 3, seed=1)),
    Case("CholeskyInverseBackward0", torch.cholesky_inverse, lower),
    Case("CholeskySolveBackward0", torch.cholesky_solve, B, lower),
    Case("GridSampler2DBackward0", lambda t, p: F.grid_sample(t, p, align_corners=False), randn(1, 2, 3, 3), grid),
    Case("GridSampler3DBackward0", lambda t, p: F.grid_sample(t, p, align_corners=True), randn(1, 1, 3, 3, 3), grid3),
    Case("CholeskyBackward0", quietly(lambda t: torch.cholesky(t)), P),
    Case("LinalgCholeskyExBackward0", torch.linalg.cholesky, P),
    Case("LinalgEighBackward0", lambda t: torch.linalg.eigh(t)[0], P),
    Case("LinalgHouseholderProductBackward0", torch.linalg.householder_product, leaf(reflectors), leaf(scales)),
    Case("LinalgLstsqBackward0", lambda a, b: torch.linalg.lstsq(a, b)[0], randn(4, 3), randn(4, 2, seed=1)),
    Case("LinalgLuBackward0", lambda t: torch.linalg.lu(t)[1:], A),
    Case("LinalgLuFactorExBackward0", lambda t: torch.linalg.lu_factor(t)[0], A),
    Case("LinalgLuSolveBackward0", lambda lu, b: torch.linalg.lu_solve(lu, pivots, b), leaf(factors), B),
    Case("LinalgMatrixExpBackward0", torch.linalg.matrix_exp, constant(A).mul(0.2).requires_grad_()),
    Case("LinalgMatrixSqrthBackward0", lambda t: torch.linalg.matrix_sqrth(t), P),
    Case("LinalgPinvBackward0", torch.linalg.pinv, randn(4, 3)),
    Case("LinalgPolarBackward0", lambda t: torch.linalg.polar(t), A),
    Case("LinalgQrBackward0", torch.linalg.qr, A),
    Case("LinalgSvdBackward0", torch.linalg.svdvals, randn(4, 3)),
    Case("LuUnpackBackward0", lambda lu: torch.lu_unpack(lu, pivots)[1:], leaf(factors)),
    Case("OrmqrBackward0", lambda a, t, c: torch.ormqr(a, t, c), leaf(reflectors), leaf(scales), B),
    Case("RenormBackward0", lambda t: torch.renorm(t, 2, 0, 1.0), randn(3, 4)),
    Case("TriangularSolveBackward0", quietly(lambda b, a: torch.triangular_solve(b, a)[0]), B, A),
]
