"""MNIST for the study of approximation quality, whose networks see pixels in [−1, 1]."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from .archives import read_idx as read_idx
from .archives import read_mnist


def load(folder: Path, *, train: bool) -> tuple[Tensor, Tensor]:
    """Flattened images in [−1, 1], [N, 784] in float64, and their labels."""
    images, labels = read_mnist(folder, train=train)
    return images.flatten(1).double().div_(127.5).sub_(1), labels
