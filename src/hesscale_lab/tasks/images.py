"""Tasks on images, as bytes that are normalized and perhaps augmented. Activation, width and so on are fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from . import classifiers
from .augmentation import augment
from .download import folder_with
from .task import POSITIVE, Choice, Field, Labelled, Task

Read = Callable[..., Labelled]
"""Called with a folder and ``train``."""


@dataclass(frozen=True)
class ImageTask(Task):
    """Images as bytes [N, channels, height, width], and one of ``classes`` for each."""

    archive: str | None = field(kw_only=True)  # a name in download.ARCHIVES; None: the data comes with a package
    read: Read = field(kw_only=True)
    network: classifiers.Make = field(kw_only=True)
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
        place = folder_with(self.archive, folder) if self.archive else None
        return self.read(place, train=True), self.read(place, train=False)

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
        """What the network sees of these bytes; augmented, where the task is, if there is a generator."""
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
