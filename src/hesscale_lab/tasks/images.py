"""Tasks on images, as bytes that are normalized and perhaps augmented.

CIFAR's augmentation is that of torchvision's transforms on PIL images, for a whole batch: pad by 2 zeros, crop 32 × 32,
flip, then brightness, contrast and saturation in a random order for each image. Each adjustment mixes the image with
another one, f·image + (1 − f)·other, clips and rounds down to bytes:

    brightness   other = black             f ∈ [1 − 63/255, 1 + 63/255]
    contrast     other = its mean gray     f ∈ [0.2, 1.8]
    saturation   other = its gray image    f ∈ [0.5, 1.5]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import classifiers
from .download import folder_with
from .task import POSITIVE, Choice, Field, Labelled, Task

Read = Callable[..., Labelled]
"""Called with a folder and ``train``."""


@dataclass(frozen=True)
class ImageTask(Task):
    """Images as bytes [N, channels, height, width], and one of ``classes`` for each."""

    archive: str | None = field(kw_only=True)  # a name in download.ARCHIVES; None: the data comes with a package
    read: Read = field(kw_only=True)
    network: classifiers.Classifier = field(kw_only=True)
    inputs: int = field(kw_only=True)  # pixels of an image for linear layers, channels for convolutions
    classes: int = field(kw_only=True)
    scale: float = field(kw_only=True)  # bytes are divided by it
    activation: str = field(kw_only=True)  # as the authors ran it; DeepOBS has ReLU everywhere
    normal: tuple[tuple[float, float, float], tuple[float, float, float]] | None = None  # mean and deviation of colors
    augmented: bool = False
    variant: str = "paper"
    width: float = 1.0  # all hidden widths are multiplied by it

    FIELDS: ClassVar[Mapping[str, Field]] = {
        "variant": Choice("paper", "deepobs"),
        "activation": Choice(*classifiers.ACTIVATIONS),
        "width": POSITIVE,
        **Task.FIELDS,
    }

    def load(self, folder: Path | None) -> tuple[Labelled, Labelled]:
        """Training and test images with labels: from this folder, or downloaded where there is none."""
        source = folder_with(self.archive, folder) if self.archive else None
        return self.read(source, train=True), self.read(source, train=False)

    def make(self, generator: torch.Generator) -> nn.Module:
        """The network, freshly initialized."""
        model = self.network(
            inputs=self.inputs,
            classes=self.classes,
            activation=self.activation,
            width=self.width,
            padded=self.variant == "deepobs",
            generator=generator,
        )
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def prepare(self, examples: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The network's input from bytes; with a generator, augmented where the task augments."""
        x = augment(examples, generator) if self.augmented and generator is not None else examples.float()
        x = x.contiguous(
            memory_format=torch.channels_last
        )  # convolutions on CPU are up to twice as fast in this layout
        if self.normal is None:
            return x.div_(self.scale)
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in self.normal)
        return x.sub_(mean * self.scale).div_(deviation * self.scale)

    def with_fields(self, fields: Sequence[tuple[str, Any]]) -> Self:
        """As every task; DeepOBS's variant has ReLU unless another activation is given."""
        is_theirs = dict(fields).get("variant") == "deepobs"
        return super().with_fields([("activation", "relu"), *fields] if is_theirs else fields)


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
    """Each image padded by zeros, cropped at random, and mirrored with probability ½; as floats."""
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
