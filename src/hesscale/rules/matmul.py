"""Matrix products in all their forms: the ordinary backward with squared operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..fast.workspace import product
from .calculus import added
from .families import Bilinear, Coupled, Curvatures
from .table import register

Shapes = Sequence[torch.Size | None]
Square = Tensor | None


def mm(node: Any, s: Tensor, wanted: Shapes, a2: Square, b2: Square) -> Curvatures:
    """y = AB:  s (B²)ᵀ  and  (A²)ᵀ s, laid out like the transpose of a contiguous matrix if B is one."""
    left = right = None
    if wanted[0] is not None and b2 is not None:
        left = product(s, b2.mT)
    if wanted[1] is not None and a2 is not None:
        strides = node._saved_mat2_sym_strides
        is_transposed = len(strides) == 2 and strides[0] == 1 != strides[1]  # no strides: B needs no gradient
        right = product(s.mT, a2).mT if is_transposed else product(a2.mT, s)
    return left, right


def addmm(node: Any, s: Tensor, wanted: Shapes, a2: Square, b2: Square) -> Curvatures:
    """y = βC + αAB:  β²s summed to C,  α²s (B²)ᵀ  and  (A²)ᵀ α²s."""
    factors = mm(node, _scaled(s, node._saved_alpha), wanted[1:], a2, b2)
    return _added(s, node._saved_beta, wanted[0]), *factors


def bmm(node: Any, s: Tensor, wanted: Shapes, a2: Square, b2: Square) -> Curvatures:
    """y_n = A_n B_n, as mm."""
    left = None if wanted[0] is None or b2 is None else s @ b2.mT
    return left, None if wanted[1] is None or a2 is None else a2.mT @ s


def baddbmm(node: Any, s: Tensor, wanted: Shapes, a2: Square, b2: Square) -> Curvatures:
    """y_n = βC_n + αA_n B_n, as addmm; also y = βC + α Σ_n A_n B_n, where s broadcasts over n."""
    return _added(s, node._saved_beta, wanted[0]), *bmm(node, _scaled(s, node._saved_alpha), wanted[1:], a2, b2)


def mv(node: Any, s: Tensor, wanted: Shapes, a2: Square, v2: Square) -> Curvatures:
    """y = Av:  s (v²)ᵀ  and  (A²)ᵀ s."""
    matrix = None if wanted[0] is None or v2 is None else torch.outer(s, v2)
    return matrix, None if wanted[1] is None or a2 is None else a2.mT @ s


def addmv(node: Any, s: Tensor, wanted: Shapes, a2: Square, v2: Square) -> Curvatures:
    """y = βc + αAv, as mv."""
    return _added(s, node._saved_beta, wanted[0]), *mv(node, _scaled(s, node._saved_alpha), wanted[1:], a2, v2)


def addr(node: Any, s: Tensor, wanted: Shapes, u2: Square, v2: Square) -> Curvatures:
    """y = βC + αuvᵀ:  β²s,  α² s v²,  α² sᵀ u²."""
    scaled = _scaled(s, node._saved_alpha)
    first = None if wanted[1] is None or v2 is None else scaled @ v2
    return _added(s, node._saved_beta, wanted[0]), first, None if wanted[2] is None or u2 is None else scaled.mT @ u2


def trilinear(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """y = Σ a·b·c over some dimensions of a broadcast product (nn.Bilinear). The derivative in a is b·c, summed over
    the dimensions that a lacks and y has lost; its square is weighted by s and summed over those that a lacks."""
    lacking = [list(dims) for dims in (node._saved_expand1, node._saved_expand2, node._saved_expand3)]
    saved = (node._saved_i1, node._saved_i2, node._saved_i3)
    operands = [None if x is None else _unsqueezed(x, dims) for x, dims in zip(saved, lacking, strict=True)]
    results: list[Tensor | None] = []
    for i, dims in enumerate(lacking):
        first, second = (operands[j] for j in range(3) if j != i)
        if s is None or first is None or second is None or node.next_functions[i][0] is None:
            results.append(None)
            continue
        lost = [dim for dim in dims if dim in node._saved_sumdim]
        slope = (first * second).sum(lost, keepdim=True) if lost else first * second
        curvature = slope.square() * _unsqueezed(s, node._saved_sumdim)
        results.append(curvature.sum(dims) if dims else curvature)
    return results


def grouped_mm(node: Any, s: Tensor, wanted: Shapes, a2: Square, b2: Square) -> Curvatures:
    """y = A_e B_e for each expert e, whose rows end where the offsets say (mixtures of experts)."""
    ends = node._saved_offs.tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if (a2 is not None and a2.dim() != 2) or (b2 is not None and b2.dim() != 3):
        raise NotImplementedError("grouped products have a rule for a matrix times a stack of matrices only")
    left = right = None
    if wanted[0] is not None and b2 is not None:
        left = torch.cat([s[start:end] @ b2[e].mT for e, (start, end) in enumerate(spans)])
    if wanted[1] is not None and a2 is not None:
        right = torch.stack([a2[start:end].mT @ s[start:end] for start, end in spans])
    return left, right


def dot(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """y = aᵀb:  s b²  and  s a²;  y = aᵀa:  4a²s + 2g, given to one of the two edges."""
    a = node._saved_self
    b = node._saved_tensor if hasattr(node, "_saved_tensor") else node._saved_other
    (first, second) = node.next_functions
    if first == second:
        transport = None if s is None else 4 * s * a.square()
        residual = None if g is None else (2 * g).expand_as(a)
        return added(transport, residual), None
    if s is None:
        return None, None
    return None if b is None else s * b.square(), None if a is None else s * a.square()


def _scaled(s: Tensor, alpha: float) -> Tensor:
    return s if alpha == 1 else s * alpha**2


def _added(s: Tensor, beta: float, shape: torch.Size | None) -> Tensor | None:
    if shape is None:
        return None
    scaled = _scaled(s, beta)
    return scaled.sum(0) if len(shape) == 1 and scaled.dim() == 2 and shape[0] != 1 else scaled.sum_to_size(shape)


def _unsqueezed(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted(dims):
        tensor = tensor.unsqueeze(dim)
    return tensor


_ADDED = ((0, 1), (0, 2))  # linear in the addend and in either factor
register(Bilinear(mm, ("self", "mat2")), "MmBackward0")
register(Bilinear(addmm, ("mat1", "mat2"), _ADDED), "AddmmBackward0")
register(Bilinear(bmm, ("self", "mat2")), "BmmBackward0")
register(Bilinear(baddbmm, ("batch1", "batch2"), _ADDED), "BaddbmmBackward0", "AddbmmBackward0")
register(Bilinear(mv, ("self", "vec")), "MvBackward0")
register(Bilinear(addmv, ("mat", "vec"), _ADDED), "AddmvBackward0")
register(Bilinear(addr, ("vec1", "vec2"), _ADDED), "AddrBackward0")
register(Coupled(trilinear), "TrilinearBackward0")
register(Bilinear(grouped_mm, ("self", "mat2")), "GroupedMmBackward0")
register(Coupled(dot), "DotBackward0", "VdotBackward0")
