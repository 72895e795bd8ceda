"""MNIST from a folder laid out as torchvision does: ``DIR/MNIST/raw/*-ubyte``, with or without ``.gz``."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_MAGIC = {2049: 1, 2051: 3}  # the first four bytes of labels and images, and how many dimensions follow


def read_idx(path: Path) -> Tensor:
    """The bytes of an IDX file as a tensor of its shape; the file may be compressed."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    magic = int.from_bytes(data[:4], "big")
    if magic not in _MAGIC:
        raise ValueError(f"{path} is no IDX file of images or labels: it begins with {magic}")
    dims = _MAGIC[magic]
    shape = [int.from_bytes(data[4 * i : 4 * i + 4], "big") for i in range(1, dims + 1)]
    values = np.frombuffer(data, np.uint8, offset=4 * dims + 4)
    if values.size != np.prod(shape):
        raise ValueError(f"{path} is cut short: {values.size} values for the shape {shape}")
    return torch.from_numpy(values.reshape(shape).copy())


def load(folder: Path, *, train: bool) -> tuple[Tensor, Tensor]:
    """Flattened images in [−1, 1], [N, 784] in float64, and their labels."""
    part = "train" if train else "t10k"
    images = read_idx(_find(folder, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte"))
    return images.flatten(1).double().div_(127.5).sub_(1), labels.long()


def _find(folder: Path, name: str) -> Path:
    for path in (folder / "MNIST" / "raw" / name, folder / "MNIST" / "raw" / f"{name}.gz"):
        if path.exists():
            return path
    raise FileNotFoundError(f"{folder} has no MNIST/raw/{name}[.gz]: point --data at a folder as torchvision makes it")
