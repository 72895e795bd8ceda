"""Rows for normalization, with and without weight and bias, over batches and from running statistics."""

from typing import Any

import torch
import torch.nn.functional as F

from ..case import Case, between, constant, randn

x, image = randn(4, 6), randn(3, 4, 2, 3)
w6, b6, w4, b4 = randn(6, seed=1), randn(6, seed=2), randn(4, seed=3), randn(4, seed=4)
mean4, var4 = constant(randn(4, seed=5)), constant(between(0.5, 2.0, 4))


def batch(training: bool) -> Any:
    return lambda t, *affine: F.batch_norm(t, cast(mean4, t), cast(var4, t), *affine, training=training)


def cast(statistics: Any, like: Any) -> Any:
    return statistics.to(like.dtype).clone()


def legit(name: str, *flags: Any) -> Any:
    operation = getattr(torch.ops.aten, name)
    return lambda t, *affine: operation(t, *affine, cast(mean4, t), cast(var4, t), *flags, 0.1, 1e-5)[0]


def weight_norm(dim: int) -> Any:
    return lambda v, g: torch._weight_norm(v, g, dim)


def plain_weight_norm(dim: int) -> Any:
    """The same in plain operations: torch's double backward of the fused one is not its second derivative."""
    return lambda v, g: v * (g / v.norm(dim=[d for d in range(v.dim()) if d != dim], keepdim=True))


_LAYER, _GROUP, _BATCH = "NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0"
CASES = [
    Case(_LAYER, lambda t, w, b: F.layer_norm(t, (6,), w, b), x, w6, b6),
    Case(_LAYER, lambda t: F.layer_norm(t, (2, 3)), image, label="two-dims"),
    Case(_LAYER, lambda t, w: F.layer_norm(t, (6,), w, eps=0.3), x, w6, label="weight-eps"),
    Case(_LAYER, lambda t, w, b: F.layer_norm(t, (6,), w, b), constant(x), w6, b6, label="affine-only"),
    Case(_LAYER, lambda t, w, b: torch.native_layer_norm(t, (6,), w, b, 1e-5), x, w6, b6, label="statistics"),
    Case(_GROUP, lambda t, w, b: F.group_norm(t, 2, w, b), image, w4, b4),
    Case(_GROUP, lambda t: F.group_norm(t, 4), image, label="plain"),
    Case(_GROUP, lambda t, w, b: F.group_norm(t, 1, w, b, eps=0.2), randn(3, 4), w4, b4, label="flat"),
    Case(_GROUP, lambda t: torch.native_group_norm(t, None, None, 3, 4, 6, 2, 1e-5), image, label="statistics"),
    Case(_BATCH, batch(True), image, w4, b4, label="train"),
    Case(_BATCH, batch(False), image, w4, b4, label="eval"),
    Case(_BATCH, batch(True), randn(5, 4), label="flat"),
    Case(_BATCH, lambda t: F.instance_norm(t), image, label="instance"),
    Case("NativeBatchNormLegitBackward0", legit("_native_batch_norm_legit", True), image, w4, b4),
    Case(
        "NativeBatchNormLegitBackward1",
        lambda t, w, b: torch.ops.aten._native_batch_norm_legit.no_stats(t, w, b, True, 0.1, 1e-5)[0],
        image,
        w4,
        b4,
    ),
    Case("NativeBatchNormLegitNoTrainingBackward0", legit("_native_batch_norm_legit_no_training"), image, w4, b4),
    Case("BatchNormWithUpdateBackward0", legit("_batch_norm_with_update"), image, w4, b4),
    Case("BatchNormNoUpdateBackward0", legit("_batch_norm_no_update"), image, w4, b4),
    Case(
        "WeightNormInterfaceBackward0", weight_norm(0), randn(4, 6), randn(4, 1, seed=1), reference=plain_weight_norm(0)
    ),
    Case(
        "WeightNormInterfaceBackward0",
        weight_norm(2),
        randn(4, 2, 3),
        randn(1, 1, 3, seed=1),
        reference=plain_weight_norm(2),
        label="last-dim",
    ),
]
