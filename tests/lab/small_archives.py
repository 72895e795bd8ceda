"""MNIST and CIFAR with a few random images, in files laid out as the real ones."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np


def idx(values: np.ndarray) -> bytes:
    magic = 2049 if values.ndim == 1 else 2051
    return b"".join(number.to_bytes(4, "big") for number in (magic, *values.shape)) + values.tobytes()


def write_mnist(folder: Path, count: int) -> None:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images = generator.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (raw / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))


def write_cifar(folder: Path, count: int, *, classes: int) -> None:
    generator = np.random.default_rng(0)
    ten = classes == 10
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"] if ten else ["train", "test"]
    inside = folder / ("cifar-10-batches-py" if ten else "cifar-100-python")
    inside.mkdir(parents=True)
    for name in names:
        images = generator.integers(256, size=(count, 3072), dtype=np.uint8)
        labels = [number % classes for number in range(count)]
        content = {b"data": images, b"labels" if ten else b"fine_labels": labels}
        (inside / name).write_bytes(pickle.dumps(content, protocol=2))
