"""Interpolation, a linear map that is a product of one small matrix per dimension, and the grids it may start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .families import Coupled
from .table import register

Upsample = Callable[..., Tensor]


def separable(upsample: Upsample, scales: tuple[str, ...]) -> Coupled:
    """The rule of  y = (A ⊗ B ⊗ …) x:  (A∘A ⊗ B∘B ⊗ …)ᵀ s. The matrices are what ``upsample`` makes of unit vectors."""

    def curvature(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
        if s is None:
            return None
        lengths = node._saved_self_sym_sizes[-len(scales) :]
        for axis, scale in enumerate(scales):
            matrix = _matrix(upsample, node, lengths, axis, getattr(node, f"_saved_{scale}"), s)
            dim = axis - len(scales)
            s = (s.movedim(dim, -1) @ matrix.square()).movedim(-1, dim)
        return s

    return Coupled(curvature, linear=True)


def _matrix(upsample: Upsample, node: Any, lengths: Any, axis: int, scale: float | None, like: Tensor) -> Tensor:
    """[out, in] along one axis: unit vectors along it, upsampled with all other axes constant."""
    length, size = lengths[axis], node._saved_output_size[axis]
    shape, short = [1] * len(lengths), [2] * len(lengths)  # not 1: torch's antialiased kernels err on such images
    shape[axis], units = length, torch.eye(length, dtype=like.dtype, device=like.device)
    images = units.reshape(length, 1, *shape).expand(length, 1, *short[:axis], length, *short[axis + 1 :])
    output, factors = [*short[:axis], size, *short[axis + 1 :]], [None] * axis + [scale]
    factors += [None] * (len(lengths) - len(factors))
    result = upsample(images, output, node._saved_align_corners, *factors)[:, 0]
    for other in reversed(range(len(lengths))):
        if other != axis:
            result = result.select(other + 1, 0)
    return result.mT


def affine_grid(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Places x of an image, moved by one matrix each:  y = θ(x, 1),  so  Σ_x (x, 1)² s  for θ."""
    if s is None:
        return None
    dims = s.shape[-1]
    units = torch.zeros(dims + 1, dims, dims + 1, dtype=s.dtype, device=s.device)
    units[:, 0] = torch.eye(dims + 1, dtype=s.dtype, device=s.device)  # each asks for one coordinate of all places
    places = F.affine_grid(units, [dims + 1, *node._saved_size[1:]], node._saved_align_corners)[..., 0]
    return s.flatten(1, -2).mT @ places.flatten(1).square().mT


_TWO, _THREE = ("scales_h", "scales_w"), ("scales_d", "scales_h", "scales_w")
_aten = torch.ops.aten
register(separable(_aten.upsample_linear1d, ("scales",)), "UpsampleLinear1DBackward0")
register(separable(_aten.upsample_bilinear2d, _TWO), "UpsampleBilinear2DBackward0")
register(separable(_aten.upsample_bicubic2d, _TWO), "UpsampleBicubic2DBackward0")
register(separable(_aten.upsample_trilinear3d, _THREE), "UpsampleTrilinear3DBackward0")
register(separable(_aten._upsample_bilinear2d_aa, _TWO), "UpsampleBilinear2DAaBackward0")
register(separable(_aten._upsample_bicubic2d_aa, _TWO), "UpsampleBicubic2DAaBackward0")
register(Coupled(affine_grid, linear=True), "AffineGridGeneratorBackward0")
