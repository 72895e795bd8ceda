"""The tasks as a table: which data, which network, how it is trained."""

from __future__ import annotations

from . import classifiers
from .archives import read_cifar10, read_cifar100, read_digits, read_mnist
from .images import ImageTask
from .task import Task
from .text import TextTask

_CIFAR10 = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
_CIFAR100 = (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)

TASKS: dict[str, Task] = {
    "digits": ImageTask(
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
    "mnist-mlp": ImageTask(
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
    "cifar10-3c3d": ImageTask(
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
    "cifar100-3c3d": ImageTask(
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
    "cifar100-allcnnc": ImageTask(
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
    "text-gpt": TextTask(title="text, GPT of 5 layers and width 128", epochs=10, batch=32, validation=0.1),
}
"""The tasks of the paper and two others, and those that a plugin adds."""


def task_named(name: str) -> Task:
    """The task of this name; ValueError that lists all names if there is none."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: choose among {', '.join(TASKS)}")
    return TASKS[name]
