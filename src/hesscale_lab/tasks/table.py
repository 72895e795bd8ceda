"""The tasks as a table: which data, which network, how it is trained. Activation, width and so on are fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import classifiers
from .archives import Labelled, read_cifar10, read_cifar100, read_mnist
from .augmentation import augment
from .digits import read_digits
from .download import folder_with

Read = Callable[..., Labelled]
"""Called with a folder and ``train``."""

VARIANTS = ("paper", "deepobs")
FIELDS = ("variant", "activation", "width", "batch", "weight_decay")


@dataclass(frozen=True)
class Task:
    """One row of the table. Its FIELDS can be set to other values by ``with_fields``."""

    title: str
    archive: str | None  # a name in download.ARCHIVES; None: the data comes with a package
    read: Read
    network: classifiers.Make
    inputs: int  # pixels of an image for linear layers, channels for convolutions
    classes: int
    scale: float  # bytes are divided by it
    activation: str  # as the authors ran it; DeepOBS has ReLU everywhere
    epochs: int  # of the paper
    batch: int = 128
    weight_decay: float = 0.0
    validation: int = 10_000  # training images held back
    measured: int = 10_000  # training images that the training loss is measured on
    normal: tuple[tuple[float, float, float], tuple[float, float, float]] | None = None  # mean and deviation of colors
    augmented: bool = False
    fused: bool = True  # compiling the optimizer's update pays in runs of minutes
    variant: str = "paper"
    width: float = 1.0  # all hidden widths are multiplied by it

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

    def prepare(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What the network sees of these bytes; augmented, where the task is, if there is a generator."""
        x = augment(images, generator) if self.augmented and generator is not None else images.float()
        x = x.contiguous(
            memory_format=torch.channels_last
        )  # convolutions on CPU are up to twice as fast in this layout
        if self.normal is None:
            return x.div_(self.scale)
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in self.normal)
        return x.sub_(mean * self.scale).div_(deviation * self.scale)

    def with_fields(self, fields: Sequence[tuple[str, Any]]) -> Task:
        """This task with other values in some FIELDS; ValueError if there is no such field or value."""
        wanted = dict(fields)
        for name, value in wanted.items():
            _refuse_bad_field(name, value)
        if wanted.get("variant") == "deepobs":
            wanted = {"activation": "relu", **wanted}
        return replace(self, **wanted)


def _refuse_bad_field(name: str, value: Any) -> None:
    if name not in FIELDS:
        raise ValueError(f"unknown field {name!r}: choose among {', '.join(FIELDS)}")
    choices = {"variant": VARIANTS, "activation": tuple(classifiers.ACTIVATIONS)}.get(name)
    if choices is not None and value not in choices:
        raise ValueError(f"unknown {name} {value!r}: choose among {', '.join(choices)}")
    if choices is None and not _is_number(name, value):
        raise ValueError(f"{name} must be {_NUMBERS[name]}, not {value!r}")


_NUMBERS = {"width": "a positive number", "batch": "a positive whole number", "weight_decay": "a number from 0"}


def _is_number(name: str, value: Any) -> bool:
    if name == "batch":
        return isinstance(value, int) and value > 0
    is_finite = isinstance(value, (int, float)) and math.isfinite(value)
    return is_finite and (value >= 0 if name == "weight_decay" else value > 0)


def parse_field(text: str) -> tuple[str, Any]:
    """A field given as ``name=value``; ValueError if it is not of that form."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a field is given as name=value, not {text!r}")
    number = {"batch": int, "width": float, "weight_decay": float}.get(name)
    try:
        parsed = value if number is None else number(value)
    except ValueError:
        raise ValueError(f"{name} must be {_NUMBERS[name]}, not {value!r}") from None
    _refuse_bad_field(name, parsed)
    return name, parsed


def parse_fields(texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """Fields given so, sorted by name; of a name that is given twice, the last."""
    return tuple(sorted(dict(map(parse_field, texts)).items()))


_CIFAR10 = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
_CIFAR100 = (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)

TASKS: Mapping[str, Task] = {
    "digits": Task(
        title="digits, MLP 64-64-32-10",
        archive=None,
        read=read_digits,
        network=classifiers.small_mlp,
        inputs=64,
        classes=10,
        scale=16.0,
        activation="tanh",
        epochs=20,
        batch=32,
        validation=300,
        measured=300,
        fused=False,
    ),
    "mnist-mlp": Task(
        title="MNIST, MLP 784-1000-500-100-10",
        archive="mnist",
        read=read_mnist,
        network=classifiers.mlp,
        inputs=784,
        classes=10,
        scale=255.0,
        activation="tanh",
        epochs=100,
    ),
    "cifar10-3c3d": Task(
        title="CIFAR-10, 3C3D",
        archive="cifar10",
        read=read_cifar10,
        network=classifiers.three_c_three_d,
        inputs=3,
        classes=10,
        scale=255.0,
        activation="tanh",
        epochs=100,
        weight_decay=2e-3,
        normal=_CIFAR10,
        augmented=True,
    ),
    "cifar100-3c3d": Task(
        title="CIFAR-100, 3C3D",
        archive="cifar100",
        read=read_cifar100,
        network=classifiers.three_c_three_d,
        inputs=3,
        classes=100,
        scale=255.0,
        activation="elu",
        epochs=200,
        weight_decay=2e-3,
        normal=_CIFAR100,
        augmented=True,
    ),
    "cifar100-allcnnc": Task(
        title="CIFAR-100, ALL-CNN-C",
        archive="cifar100",
        read=read_cifar100,
        network=classifiers.all_cnn_c,
        inputs=3,
        classes=100,
        scale=255.0,
        activation="elu",
        epochs=350,
        batch=256,
        weight_decay=5e-4,
        normal=_CIFAR100,
        augmented=True,
    ),
}


def task_named(name: str) -> Task:
    """The row of this name; ValueError with the names there are."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: choose among {', '.join(TASKS)}")
    return TASKS[name]
