"""Pooling: maxima select, averages scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .families import Coupled, Selection, signed
from .table import register

register(
    Selection(linear=False),
    "AdaptiveMaxPool2DBackward0",
    "AdaptiveMaxPool3DBackward0",
    "FractionalMaxPool2DBackward0",
    "FractionalMaxPool3DBackward0",
    "MaxPool2DWithIndicesBackward0",
    "MaxPool3DWithIndicesBackward0",
)
register(Selection(), "MaxUnpool2DBackward0", "MaxUnpool3DBackward0")


def average(
    pool: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Callable[[Any, Tensor | None, Tensor | None], Tensor | None]:
    """The rule of an average over windows:  Jᵀ(s/n), where n is the divisor of each window."""

    def curvature(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
        if s is None:
            return None
        x = node._saved_self
        ones = x.new_ones(1, *x.shape[-_spatial_dims(node) :])
        window = (node._saved_kernel_size, node._saved_stride, node._saved_padding, node._saved_ceil_mode)
        pads, divisor = node._saved_count_include_pad, node._saved_divisor_override
        divisor = None if divisor is None else signed(divisor)
        share = pool(ones, *window, pads, divisor)  # elements / divisor
        elements = pool(ones, *window, pads, 1)
        return backward(s * (share / elements), x, *window, pads, divisor)  # the node's own might be in half precision

    return curvature


def adaptive_average(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Jᵀ(s/n), where n is the size of each window: window i of m over k elements is ⌊ik/m⌋ … ⌈(i+1)k/m⌉."""
    if s is None:
        return None
    spatial, x = _spatial_dims(node), node._saved_self
    for dim in range(-spatial, 0):
        windows = _window_sizes(x.shape[dim], s.shape[dim]).to(s)
        s = s / windows.reshape(-1, *[1] * (-dim - 1))
    aten = torch.ops.aten
    found: Tensor = (aten._adaptive_avg_pool3d_backward if spatial == 3 else aten._adaptive_avg_pool2d_backward)(s, x)
    return found


def _spatial_dims(node: Any) -> int:
    return 3 if "3D" in node.name() else 2


def _window_sizes(length: int, windows: int) -> Tensor:
    places = torch.arange(windows)
    return -(-(places + 1) * length // windows) - places * length // windows


register(Coupled(average(F.avg_pool2d, torch.ops.aten.avg_pool2d_backward), linear=True), "AvgPool2DBackward0")
register(Coupled(average(F.avg_pool3d, torch.ops.aten.avg_pool3d_backward), linear=True), "AvgPool3DBackward0")
register(Coupled(adaptive_average, linear=True), "AdaptiveAvgPool2DBackward0", "AdaptiveAvgPool3DBackward0")
