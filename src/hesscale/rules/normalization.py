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

from ..fast.chunking import by_rows
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
    """The curvature of x in a = (x − m)/r, given s and g at a; ``inverse`` is 1/r, ``share`` is 1/n.

    Transport and residual, multiplied out, are a polynomial in a_i. With σ = 1/n (0 without m), t = g + as and sums
    over the group, r² times the curvature is

        (1 − 2σ)s  +  σ² Σs − (1 − σ)/n Σag  +  a·(2σ/n Σt  +  a/n² (Σat + 2Σag)  −  2t/n)
    """
    shift = share if centered else 0.0
    along = None if g is None else _total(a * g, dims)
    t = added(None if s is None else a * s, g)
    if t is None:
        return None
    top = added(_total(a * t, dims), None if along is None else 2 * along)
    assert top is not None
    inner = a * (share**2 * top)
    inner = inner.add_(_total(t, dims), alpha=2 * shift * share) if centered else inner
    result = inner.sub_(t, alpha=2 * share).mul_(a)
    if s is not None:
        result.add_(s, alpha=1 - 2 * shift)
        if centered:
            result.add_(_total(s, dims), alpha=shift**2)
    if along is not None:
        result.sub_(along, alpha=share * (1 - shift))
    return result.mul_(inverse.square())


def _total(t: Tensor, dims: Sequence[int]) -> Tensor:
    return t.sum(list(dims), keepdim=True) if dims else t  # torch takes no dimensions for all of them


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
    return _over_last(node, s, g, mean=node._saved_result1, inverse=node._saved_result2)


def rms_norm(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """Over the last dimensions, by the root of the mean square; it has no bias."""
    return _over_last(node, (s,), (g,), mean=None, inverse=node._saved_result1)[:2]


def _over_last(node: Any, s: Curvatures, g: Curvatures, *, mean: Tensor | None, inverse: Tensor) -> Curvatures:
    """The curvature of x, weight and bias. A row of the tables is what is normalized together."""
    x, weight, shape = node._saved_input, node._saved_weight, torch.Size(node._saved_normalized_shape)
    width, rows = shape.numel(), math.prod(x.shape[: x.dim() - len(shape)])
    scale = None if weight is None else weight.reshape(width)
    affine: Curvatures = (None, None)

    def work(x: Tensor, s: Any, g: Any, inverse: Tensor, mean: Any, *seeds: Tensor | None) -> Curvatures:
        nonlocal affine
        a = x * inverse if mean is None else (x - mean).mul_(inverse)
        affine = [*map(added, affine, _affine(a, s, (0,), shape))]
        curvature = standardized(a, inverse, *_scaled(s, g, scale), (1,), share=1 / width, centered=mean is not None)
        return (added(curvature, _of_statistics(a, inverse, *seeds, share=1 / width)),)

    wide = (None if t is None else t.reshape(rows, width) for t in (x, s[0], g[0]))
    narrow = (None if t is None else t.reshape(rows, 1) for t in (inverse, mean, *_statistics_seeds(s, g)))
    (total,) = by_rows(work, *wide, *narrow)
    return None if total is None else total.reshape(x.shape), *affine


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
    x, training = node._saved_input, _is_training(node)
    dims, share = range(1, x.dim()), x.shape[1] / max(x.numel(), 1)

    def work(x: Tensor, s: Any, g: Any, mean: Tensor, inverse: Tensor, weight: Tensor | None) -> Curvatures:
        a = (x - mean).mul_(inverse)
        at_a = _scaled(s, g, weight)
        if training:
            curvature = standardized(a, inverse, *at_a, dims, share=share)
        else:
            curvature = None if at_a[0] is None else at_a[0] * inverse.square()
        return curvature, *_affine(a, s, dims, x.shape[:1])

    of_channels = (*_statistics(node, training), node._saved_weight)
    tables: list[Any] = [None if t is None else t.transpose(0, 1) for t in (x, s, g)]  # a row is a channel
    tables += [None if t is None else t.reshape(-1, *[1] * (x.dim() - 1)) for t in of_channels]
    # with channels last in memory, all rows lie between each other
    curvature, *affine = by_rows(work, *tables) if x.is_contiguous() else work(*tables)
    return None if curvature is None else curvature.transpose(0, 1), *affine


def _is_training(node: Any) -> bool:
    uses_running = "NoUpdate" in node.name() or "NoTraining" in node.name()
    return bool(getattr(node, "_saved_training", not uses_running))


def _statistics(node: Any, training: bool) -> tuple[Tensor, Tensor]:
    if training:
        return node._saved_result1, node._saved_result2
    epsilon = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    return node._saved_running_mean, (node._saved_running_var + epsilon).rsqrt()


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
