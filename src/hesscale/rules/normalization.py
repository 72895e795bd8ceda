"""Normalization: x is divided by its own size, so every output depends on every input of its group.

For a = (x − m)/r with r² = mean((x − m)²) + ε over a group of n elements (or m = 0: RMS norm; or r the plain norm, then
1/n is 1 below), c_ki = δ_ki − 1/n − a_k a_i/n:

    ∂a_k/∂x_i   =  c_ki / r
    ∂²a_k/∂x_i² = −(2 a_i c_ki + a_k c_ii) / (n r²)

All sums over k reduce to sums over the group, so the cost is that of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .calculus import added
from .families import Coupled, Curvatures
from .table import register


def standardized(
    a: Tensor,
    inverse: Tensor,
    s: Tensor | None,
    g: Tensor | None,
    dims: Sequence[int],
    *,
    share: float,
    centered: bool = True,
) -> Tensor | None:
    """The curvature of x in a = (x − m)/r, given s and g at a; ``inverse`` is 1/r, ``share`` is 1/n."""
    shift = share if centered else 0.0
    return added(
        None if s is None else _transport(a, s, dims, share, shift) * inverse.square(),
        None if g is None else _residual(a, g, dims, share, shift) * inverse.square(),
    )


def _transport(a: Tensor, s: Tensor, dims: Sequence[int], share: float, shift: float) -> Tensor:
    """Σ_k (δ_ki − shift − a_k a_i·share)² s_k, multiplied out."""

    def total(t: Tensor) -> Tensor:
        return _total(t, dims)

    own = s * (1 - 2 * shift - 2 * share * a.square())
    cross = shift**2 * total(s) if shift else 0.0
    mixed = 2 * shift * share * a * total(a * s) if shift else 0.0
    return own + cross + mixed + share**2 * a.square() * total(a.square() * s)


def _total(t: Tensor, dims: Sequence[int]) -> Tensor:
    return t.sum(list(dims), keepdim=True) if dims else t  # torch takes no dimensions for all of them


def _residual(a: Tensor, g: Tensor, dims: Sequence[int], share: float, shift: float) -> Tensor:
    """−share (2 a_i Σ_k g_k c_ki + c_ii Σ_k g_k a_k)."""
    along = _total(g * a, dims)
    drift = shift * _total(g, dims) if shift else 0.0
    own = 1 - shift - share * a.square()
    return -share * (2 * a * (g - drift - share * a * along) + own * along)


def _scaled(s: Tensor | None, g: Tensor | None, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """s and g at a, from those at weight·a + bias."""
    if weight is None:
        return s, g
    return None if s is None else s * weight.square(), None if g is None else g * weight


def _affine(a: Tensor, s: Tensor | None, dims: Sequence[int], shape: torch.Size | None) -> Curvatures:
    """The curvature of weight and bias in weight·a + bias:  Σ a² s  and  Σ s."""
    if s is None or shape is None:
        return None, None
    over = list(dims)
    weight, bias = (s * a.square(), s) if not over else ((s * a.square()).sum(over), s.sum(over))
    return weight.reshape(shape), bias.reshape(shape)


def layer_norm(node: Any, s: Curvatures, g: Curvatures) -> Curvatures:
    """Over the last dimensions; weight and bias per element of them."""
    x, weight, inverse = node._saved_input, node._saved_weight, node._saved_result2
    a = (x - node._saved_result1) * inverse
    inner = len(node._saved_normalized_shape)
    dims, outer = range(-inner, 0), range(x.dim() - inner)
    share = 1 / math.prod(node._saved_normalized_shape)
    curvature = standardized(a, inverse, *_scaled(s[0], g[0], weight), dims, share=share)
    total = added(curvature, _of_statistics(a, inverse, *_statistics_seeds(s, g), share=share))
    return total, *_affine(a, s[0], outer, torch.Size(node._saved_normalized_shape))


def group_norm(node: Any, s: Curvatures, g: Curvatures) -> Curvatures:
    """Over the channels of a group and all places; weight and bias per channel."""
    x, weight, groups = node._saved_input, node._saved_weight, node._saved_group
    samples, channels = x.shape[:2]
    split = (samples, groups, channels // groups, math.prod(x.shape[2:]))
    mean, inverse = (t.reshape(samples, groups, 1, 1) for t in (node._saved_result1, node._saved_result2))
    a = (x.reshape(split) - mean) * inverse
    s0, g0 = (None if t is None else t.reshape(split) for t in (s[0], g[0]))
    scale = None if weight is None else weight.reshape(1, groups, -1, 1)
    share = 1 / (a.shape[2] * a.shape[3]) if a.numel() else 1.0
    curvature = standardized(a, inverse, *_scaled(s0, g0, scale), (2, 3), share=share)
    statistics = (None if t is None else t.reshape(inverse.shape) for t in _statistics_seeds(s, g))
    total = added(curvature, _of_statistics(a, inverse, *statistics, share=share))
    return None if total is None else total.reshape(x.shape), *_affine(a, s0, (0, 3), torch.Size([channels]))


def _statistics_seeds(s: Curvatures, g: Curvatures) -> Curvatures:
    """s of the mean, s and g of 1/r: further outputs of some kernels."""
    return (s[1], s[2], g[2]) if len(s) > 2 else (None, None, None)


def _of_statistics(
    a: Tensor, inverse: Tensor, s_mean: Tensor | None, s: Tensor | None, g: Tensor | None, *, share: float
) -> Tensor | None:
    """The curvature of x in the mean and in 1/r, which some of these kernels return as well; centered if it has a mean.

    u = 1/r:  u' = −a u²/n,  u'' = −(u³/n)(c_ii − 2a²/n).
    """
    mean = None if s_mean is None else (s_mean * share**2).expand_as(a)
    transport = None if s is None else (a * inverse.square() * share).square() * s
    residual = None if g is None else -share * inverse**3 * (1 - share - 3 * share * a.square()) * g
    return added(mean, added(transport, residual))


def batch_norm(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """Over the batch and all places, per channel. With running statistics (eval) it is affine."""
    x, weight = node._saved_input, node._saved_weight
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    training = _is_training(node)
    mean, inverse = (t.reshape(shape) for t in _statistics(node, training))
    a = (x - mean) * inverse
    at_a = _scaled(s, g, None if weight is None else weight.reshape(shape))
    if training:
        curvature = standardized(a, inverse, *at_a, dims, share=x.shape[1] / x.numel())
    else:
        curvature = None if at_a[0] is None else at_a[0] * inverse.square()
    return curvature, *_affine(a, s, dims, torch.Size([x.shape[1]]))


def _is_training(node: Any) -> bool:
    uses_running = "NoUpdate" in node.name() or "NoTraining" in node.name()
    return bool(getattr(node, "_saved_training", not uses_running))


def _statistics(node: Any, training: bool) -> tuple[Tensor, Tensor]:
    if training:
        return node._saved_result1, node._saved_result2
    epsilon = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    return node._saved_running_mean, (node._saved_running_var + epsilon).rsqrt()


def rms_norm(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """Over the last dimensions, by the root of the mean square."""
    x, weight, inverse = node._saved_input, node._saved_weight, node._saved_result1
    a = x * inverse
    inner = len(node._saved_normalized_shape)
    dims, outer = range(-inner, 0), range(x.dim() - inner)
    share = 1 / math.prod(node._saved_normalized_shape)
    curvature = standardized(a, inverse, *_scaled(s, g, weight), dims, share=share, centered=False)
    return curvature, _affine(a, s, outer, torch.Size(node._saved_normalized_shape))[0]


def weight_norm(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """w = length·v/‖v‖, a norm per slice along one dimension."""
    v, length = node._saved_v, node._saved_g
    dims = [dim for dim in range(v.dim()) if dim != node._saved_dim % max(v.dim(), 1)]
    inverse = 1 / node._saved_result1.reshape(length.shape)
    a = v * inverse
    curvature = standardized(a, inverse, *_scaled(s, g, length), dims, share=1.0, centered=False)
    own = None if s is None else s * a.square()
    lengths = own.sum(dims, keepdim=True) if own is not None and dims else own
    return curvature, None if lengths is None else lengths.reshape(length.shape)


register(Coupled(layer_norm, outputs=3), "NativeLayerNormBackward0")
register(Coupled(group_norm, outputs=3), "NativeGroupNormBackward0")
register(Coupled(rms_norm), "FusedRmsNormBackward0")
register(Coupled(weight_norm), "WeightNormInterfaceBackward0")
register(
    Coupled(batch_norm),
    "BatchNormNoUpdateBackward0",
    "BatchNormWithUpdateBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    "NativeBatchNormBackward0",
    "NativeBatchNormLegitBackward0",
    "NativeBatchNormLegitBackward1",
    "NativeBatchNormLegitNoTrainingBackward0",
)
