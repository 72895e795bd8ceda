"""Rows for convolutions and interpolation: strides, padding, dilation, groups, one to three dimensions."""

from typing import Any

import torch.nn.functional as F

from ..case import Case, constant, randn

line, image, volume = randn(2, 4, 7), randn(2, 4, 5, 6), randn(1, 2, 4, 5, 3)


def conv(convolve: Any, *inputs: Any, label: str, **options: Any) -> Case:
    return Case("ConvolutionBackward0", lambda *t: convolve(*t, **options), *inputs, label=label)


def up(node: str, tensor: Any, label: str = "", **options: Any) -> Case:
    return Case(f"Upsample{node}Backward0", lambda t: F.interpolate(t, **options), tensor, label=label)


CASES = [
    conv(F.conv1d, line, randn(6, 4, 3, seed=1), randn(6, seed=2), label="1d"),
    conv(F.conv1d, line, randn(4, 1, 3, seed=1), groups=4, dilation=2, label="depthwise"),
    conv(F.conv2d, image, randn(6, 2, 3, 2, seed=1), randn(6, seed=2), groups=2, stride=2, padding=1, label="2d"),
    conv(F.conv2d, image, randn(3, 4, 2, 2, seed=1), padding="same", dilation=2, label="same"),
    conv(F.conv2d, constant(image), randn(3, 4, 2, 2, seed=1), randn(3, seed=2), label="first-layer"),
    conv(F.conv2d, image, constant(randn(3, 4, 2, 2, seed=1)), label="frozen"),
    conv(F.conv2d, image, constant(randn(3, 4, 2, 2, seed=1)), randn(3, seed=2), label="frozen-weight"),
    conv(F.conv2d, randn(4, 5, 6), randn(3, 4, 2, 2, seed=1), label="unbatched"),
    conv(F.conv3d, volume, randn(3, 2, 2, 2, 2, seed=1), randn(3, seed=2), stride=(1, 2, 1), label="3d"),
    conv(F.conv_transpose1d, line, randn(4, 3, 3, seed=1), randn(3, seed=2), stride=2, label="transposed-1d"),
    conv(
        F.conv_transpose2d,
        image,
        randn(4, 2, 3, 2, seed=1),
        randn(4, seed=2),
        groups=2,
        stride=2,
        padding=1,
        output_padding=1,
        label="transposed-2d",
    ),
    conv(F.conv_transpose3d, volume, randn(2, 2, 2, 2, 2, seed=1), dilation=2, label="transposed-3d"),
    up("Nearest1D", line, size=11),
    up("Nearest2D", image, scale_factor=2),
    up("Nearest3D", volume, size=(3, 7, 5)),
    up("NearestExact1D", line, size=11, mode="nearest-exact"),
    up("NearestExact2D", image, scale_factor=1.5, mode="nearest-exact"),
    up("NearestExact3D", volume, size=(3, 7, 5), mode="nearest-exact"),
    up("Linear1D", line, size=11, mode="linear"),
    up("Linear1D", line, "corners", size=11, mode="linear", align_corners=True),
    up("Bilinear2D", image, scale_factor=(1.7, 2.0), mode="bilinear"),
    up("Bilinear2D", image, "size", size=(9, 4), mode="bilinear", align_corners=True),
    up("Bilinear2D", image, "down", scale_factor=0.5, mode="bilinear", recompute_scale_factor=True),
    up("Bicubic2D", image, scale_factor=1.7, mode="bicubic"),
    up("Bicubic2D", image, "size", size=(9, 4), mode="bicubic", align_corners=True),
    up("Trilinear3D", volume, size=(7, 4, 6), mode="trilinear"),
    up("Bilinear2DAa", image, size=(3, 4), mode="bilinear", antialias=True),
    up("Bicubic2DAa", image, size=(3, 8), mode="bicubic", antialias=True),
    *(
        Case(
            "AffineGridGeneratorBackward0",
            lambda t, size=size, align=align: F.affine_grid(t, size, align),
            randn(2, len(size) - 2, len(size) - 1),
            label=f"{len(size) - 2}-{align}",
        )
        for size in ([2, 3, 4, 5], [2, 1, 3, 4, 2])
        for align in (True, False)
    ),
]
