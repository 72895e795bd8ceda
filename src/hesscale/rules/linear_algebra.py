"""Inverses, determinants and linear systems in closed form; decompositions element by element, for small matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .calculus import added
from .fallback import ByAutograd
from .families import Coupled, Curvatures, signed
from .table import register


def inverse(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Y = A⁻¹:  (Y²)ᵀ s (Y²)ᵀ + 2 Yᵀ ∘ (Yᵀ g Yᵀ)."""
    y = node._saved_inverse
    return _of_matrix(y, y, s, g)


def _of_matrix(y: Tensor, x: Tensor, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """The curvature of A in X = A⁻¹B, Y = A⁻¹:  (Y²)ᵀ s (X²)ᵀ + 2 Yᵀ ∘ (Yᵀ g Xᵀ)."""
    transport = None if s is None else y.square().mT @ s @ x.square().mT
    return added(transport, None if g is None else 2 * y.mT * (y.mT @ g @ x.mT))


def solve(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """X of AX = B (XA = B with left=False);  B enters linearly."""
    a, x = node._saved_A, node._saved_result
    vector = x.dim() == a.dim() - 1
    if not node._saved_left:
        results = _solve(torch.linalg.inv(a.mT), *(None if t is None else t.mT for t in (x, s, g)))
        return [None if t is None else t.mT for t in results]
    columns = [None if t is None else t.unsqueeze(-1) if vector else t for t in (x, s, g)]
    first, second = _solve(torch.linalg.inv(a), *columns)
    return first, second.squeeze(-1) if vector and second is not None else second


def _solve(y: Tensor, x: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    return _of_matrix(y, x, s, g), None if s is None else y.square().mT @ s


def triangular(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """The same for a triangle A, of which only that half (without a unit diagonal) counts."""
    a, x, upper, unit = node._saved_self, node._saved_result, node._saved_upper, node._saved_unitriangular
    half = a.triu(int(unit)) if upper else a.tril(-int(unit))
    full = half + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) if unit else half
    if node._saved_left:
        matrix, right = _solve(torch.linalg.inv(full), x, s, g)
    else:
        flipped = _solve(torch.linalg.inv(full.mT), *(None if t is None else t.mT for t in (x, s, g)))
        matrix, right = (None if t is None else t.mT for t in flipped)
    if matrix is not None:
        matrix = matrix.triu(int(unit)) if upper else matrix.tril(-int(unit))
    return matrix, right


def determinant(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """det A, linear in each entry:  (det A)² (Yᵀ)² s, Y = A⁻¹."""
    if s is None:
        return None
    cofactors: Tensor = node._saved_result[..., None, None] * torch.linalg.inv(node._saved_A).mT
    return cofactors.square() * s[..., None, None]


def log_determinant(node: Any, s: Curvatures, g: Curvatures) -> Tensor | None:
    """log|det A|:  (Yᵀ)² (s − g), Y = A⁻¹; the sign is flat."""
    total = added(s[1], None if g[1] is None else -g[1])
    return None if total is None else torch.linalg.inv(node._saved_A).mT.square() * total[..., None, None]


def cross(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """y_i = a_j b_k − a_k b_j:  s_j b_k² + s_k b_j² for a_i, and the same for b."""
    dim = signed(node._saved_dim)
    if s is None:
        return None, None

    def other(factor: Tensor | None) -> Tensor | None:
        if factor is None:
            return None
        square = factor.square()
        return s.roll(-1, dim) * square.roll(-2, dim) + s.roll(-2, dim) * square.roll(-1, dim)

    return other(node._saved_other), other(node._saved_self)


register(Coupled(inverse), "LinalgInvExBackward0")
register(Coupled(solve), "LinalgSolveExBackward0")
register(Coupled(triangular), "LinalgSolveTriangularBackward0")
register(Coupled(determinant), "LinalgDetBackward0")
register(Coupled(log_determinant, outputs=4), "LinalgSlogdetBackward0")
register(Coupled(cross), "LinalgCrossBackward0")
register(
    ByAutograd(),
    "CholeskyBackward0",
    "CholeskyInverseBackward0",
    "CholeskySolveBackward0",
    "LinalgCholeskyExBackward0",
    "LinalgEighBackward0",
    "LinalgHouseholderProductBackward0",
    "LinalgLstsqBackward0",
    "LinalgLuBackward0",
    "LinalgLuFactorExBackward0",
    "LinalgLuSolveBackward0",
    "LinalgMatrixExpBackward0",
    "LinalgMatrixSqrthBackward0",
    "LinalgPinvBackward0",
    "LinalgPolarBackward0",
    "LinalgQrBackward0",
    "LinalgSvdBackward0",
    "LuUnpackBackward0",
    "OrmqrBackward0",
    "RenormBackward0",
    "TriangularSolveBackward0",
)
if tuple(map(int, torch.version.__version__.split(".")[:2])) >= (2, 13):  # torch 2.10 differentiates them once only
    register(ByAutograd(), "GridSampler2DBackward0", "GridSampler3DBackward0")
