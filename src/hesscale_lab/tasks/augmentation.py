"""CIFAR's augmentation for a whole batch at once, with the arithmetic of torchvision's transforms on PIL images.

Pad by 2 zeros, crop 32 × 32, flip, then brightness, contrast and saturation in an order of their own for each image.
As in PIL each adjustment mixes the image with another one, f·image + (1 − f)·other, clips and rounds down to bytes:

    brightness   other = black             f ∈ [1 − 63/255, 1 + 63/255]
    contrast     other = its mean gray     f ∈ [0.2, 1.8]
    saturation   other = its gray image    f ∈ [0.5, 1.5]
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = 2
BRIGHTNESS, CONTRAST, SATURATION = range(3)
_LOW = (1 - 63 / 255, 0.2, 0.5)
_HIGH = (1 + 63 / 255, 1.8, 1.5)
_GRAY = (19595.0, 38470.0, 7471.0)  # PIL's weights of red, green and blue, in units of 2⁻¹⁶


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Bytes [N, 3, H, W] as floats with whole values 0 … 255, each image changed at random."""
    moved = crop_and_flip(images, generator)
    factors = torch.tensor(_LOW) + torch.rand(len(images), 3, generator=generator) * (
        torch.tensor(_HIGH) - torch.tensor(_LOW)
    )
    order = torch.rand(len(images), 3, generator=generator).argsort(1)
    return jitter(moved, factors, order)


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image padded by zeros, cut out again at a random place, and mirrored in one case of two; as floats."""
    count, _, height, width = images.shape
    padded = F.pad(images, (PADDING,) * 4)
    top, left = (torch.randint(2 * PADDING + 1, (count, 1), generator=generator) for _ in range(2))
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    columns = torch.where(mirrored, columns.flip(1), columns)
    examples = torch.arange(count).view(-1, 1, 1)
    cut = padded[examples, :, rows.unsqueeze(2), columns.unsqueeze(1)]  # [N, H, W, C]
    return cut.permute(0, 3, 1, 2).float()


def jitter(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """The three adjustments with ``factors`` [N, 3], one after another as ``order`` [N, 3] says."""
    for kinds in order.unbind(1):  # [N]
        kind = kinds.view(-1, 1, 1, 1)
        factor = factors.gather(1, kinds.view(-1, 1)).view(-1, 1, 1, 1)
        gray = _gray(images)  # [N, 1, H, W]
        mean = gray.mean((1, 2, 3), keepdim=True).add_(0.5).floor_()
        other = torch.where(kind == SATURATION, gray, torch.where(kind == CONTRAST, mean, 0.0))
        images = (images - other).mul_(factor).add_(other).clamp_(0, 255).floor_()
    return images


def _gray(images: Tensor) -> Tensor:
    """PIL's conversion to gray. All sums are below 2²⁴, so that floats hold them exactly."""
    red, green, blue = images.unbind(1)
    total = red * _GRAY[0] + green * _GRAY[1] + blue * _GRAY[2] + 32768
    return total.div_(65536).floor_().unsqueeze(1)
