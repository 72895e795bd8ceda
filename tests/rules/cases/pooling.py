"""Rows for pooling; windows that overlap, are padded, cut off or of unequal size."""

from typing import Any

import torch
import torch.nn.functional as F

from ..case import Case, distinct

line, image, volume = distinct(2, 3, 9), distinct(2, 3, 7, 6), distinct(1, 2, 5, 6, 4)


def pool(node: str, function: Any, tensor: Any, *arguments: Any, label: str = "", **options: Any) -> Case:
    return Case(node, lambda t: function(t, *arguments, **options), tensor, label=label)


def fractional(function: Any, samples: Any, size: int) -> Any:
    return lambda t: function(t, 2, output_size=size, _random_samples=samples.to(t.dtype))


def unpool(function: Any, indices: Any, kernel: int, size: Any) -> Any:
    return lambda t: function(t, indices, kernel, output_size=size)


_samples2 = torch.tensor([[[0.3, 0.6]] * 3] * 2, dtype=torch.float64)
_samples3 = torch.tensor([[[0.3, 0.6, 0.2]] * 2], dtype=torch.float64)
_small2, _indices2 = F.max_pool2d(image.detach(), 2, return_indices=True)
_small3, _indices3 = F.max_pool3d(volume.detach(), 2, return_indices=True)

_AVG2, _AVG3, _MAX2 = "AvgPool2DBackward0", "AvgPool3DBackward0", "MaxPool2DWithIndicesBackward0"
CASES = [
    pool(_MAX2, F.max_pool1d, line, 3, stride=2, label="1d"),
    pool(_MAX2, F.max_pool2d, image, 3, stride=2, padding=1),
    pool(_MAX2, F.max_pool2d, image, 2, dilation=2, ceil_mode=True, label="dilated"),
    pool("MaxPool3DWithIndicesBackward0", F.max_pool3d, volume, 2, stride=1),
    pool("AdaptiveMaxPool2DBackward0", F.adaptive_max_pool2d, image, (3, 4)),
    pool("AdaptiveMaxPool3DBackward0", F.adaptive_max_pool3d, volume, 2),
    Case("FractionalMaxPool2DBackward0", fractional(F.fractional_max_pool2d, _samples2, 3), image),
    Case("FractionalMaxPool3DBackward0", fractional(F.fractional_max_pool3d, _samples3, 2), volume),
    Case("MaxUnpool2DBackward0", unpool(F.max_unpool2d, _indices2, 2, (7, 6)), distinct(*_small2.shape)),
    Case("MaxUnpool3DBackward0", unpool(F.max_unpool3d, _indices3, 2, (5, 6, 4)), distinct(*_small3.shape)),
    pool(_AVG2, F.avg_pool1d, line, 3, stride=2, label="1d"),
    pool(_AVG2, F.avg_pool2d, image, 2),
    pool(_AVG2, F.avg_pool2d, image, 3, stride=2, padding=1, ceil_mode=True, label="ceil"),
    pool(_AVG2, F.avg_pool2d, image, 3, stride=1, padding=1, count_include_pad=False, label="no-pad"),
    pool(_AVG2, F.avg_pool2d, image, 3, stride=2, divisor_override=4, label="divisor"),
    pool(_AVG2, F.avg_pool2d, distinct(3, 7, 6), (2, 3), label="unbatched"),
    pool(_AVG3, F.avg_pool3d, volume, 2, stride=1),
    pool(_AVG3, F.avg_pool3d, volume, 2, padding=1, count_include_pad=False, label="no-pad"),
    pool("AdaptiveAvgPool2DBackward0", F.adaptive_avg_pool2d, image, (3, 4)),
    pool("AdaptiveAvgPool2DBackward0", F.adaptive_avg_pool1d, line, 4, label="1d"),
    pool("AdaptiveAvgPool2DBackward0", F.interpolate, image, size=(9, 4), mode="area", label="larger"),
    pool("AdaptiveAvgPool3DBackward0", F.adaptive_avg_pool3d, volume, (2, 4, 3)),
]
