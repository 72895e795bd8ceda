"""Reads digits, MNIST and CIFAR from the files they are published in; a bad file is an error of one sentence."""

from __future__ import annotations

import gzip
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .task import Labelled


class DataError(ValueError):
    """A file of data is not what it should be."""


_MAGIC = {2049: 1, 2051: 3}  # the first four bytes of labels and images, and how many dimensions follow


def read_idx(path: Path) -> Tensor:
    """The bytes of an IDX file as a tensor of its shape; the file may be compressed."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}): get it again") from error
    magic = int.from_bytes(data[:4], "big")
    if magic not in _MAGIC:
        raise DataError(f"{path} is no IDX file of images or labels: it begins with {magic}")
    dims = _MAGIC[magic]
    shape = [int.from_bytes(data[4 * i : 4 * i + 4], "big") for i in range(1, dims + 1)]
    values = np.frombuffer(data[4 * dims + 4 :], np.uint8)
    if values.size != np.prod(shape):
        raise DataError(f"{path} is cut short: {values.size} values for the shape {shape}")
    return torch.from_numpy(values.reshape(shape).copy())


_TEST = 297  # of the 1,797 digits


def read_digits(folder: Path | None = None, *, train: bool) -> Labelled:
    """Images of 8 × 8 pixels with values 0 … 16, [N, 1, 8, 8], and labels: 1,500 for training, 297 for testing."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError:
        raise FileNotFoundError("the digits come with scikit-learn: pip install scikit-learn") from None
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    kept = order[_TEST:] if train else order[:_TEST]
    images = torch.from_numpy(digits.images).to(torch.uint8).unsqueeze(1)
    return images[kept], torch.from_numpy(digits.target).long()[kept]


def read_mnist(folder: Path, *, train: bool) -> Labelled:
    """From ``folder/MNIST/raw``, as torchvision lays it out, with or without ``.gz``: images [N, 1, 28, 28]."""
    part = "train" if train else "t10k"
    names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
    images, labels = (read_idx(_find(folder / "MNIST" / "raw", name)) for name in names)
    return _checked(images.unsqueeze(1), labels.long(), folder / "MNIST" / "raw" / names[0], classes=10)


def read_cifar10(folder: Path, *, train: bool) -> Labelled:
    """From ``folder/cifar-10-batches-py``: images [N, 3, 32, 32]."""
    names = [f"data_batch_{number}" for number in range(1, 6)] if train else ["test_batch"]
    return _read_cifar([_find(folder / "cifar-10-batches-py", name) for name in names], "labels", classes=10)


def read_cifar100(folder: Path, *, train: bool) -> Labelled:
    """From ``folder/cifar-100-python``, the 100 fine classes: images [N, 3, 32, 32]."""
    name = "train" if train else "test"
    return _read_cifar([_find(folder / "cifar-100-python", name)], "fine_labels", classes=100)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise FileNotFoundError(
        f"{folder / name} is missing: point --data at a folder with {folder.name if folder.name != 'raw' else 'MNIST'}"
        " as torchvision lays it out, or leave --data away to download it"
    )


def _read_cifar(paths: Sequence[Path], key: str, *, classes: int) -> Labelled:
    parts = [_read_cifar_file(path, key, classes=classes) for path in paths]
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def _read_cifar_file(path: Path, key: str, *, classes: int) -> Labelled:
    content = read_pickle(path)
    try:
        by_name = {name.decode() if isinstance(name, bytes) else name: value for name, value in content.items()}
        images = torch.from_numpy(np.array(by_name["data"], dtype=np.uint8, copy=True).reshape(-1, 3, 32, 32))
        labels = torch.tensor(by_name[key], dtype=torch.long)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} does not hold CIFAR's images and {key}: {error}") from error
    return _checked(images, labels, path, classes=classes)


def _checked(images: Tensor, labels: Tensor, path: Path, *, classes: int) -> Labelled:
    if len(images) != len(labels) or not len(images):
        raise DataError(f"{path} has {len(images)} images for {len(labels)} labels")
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(f"{path} has labels from {int(labels.min())} to {int(labels.max())}, not 0 to {classes - 1}")
    return images, labels


def read_pickle(path: Path) -> Any:
    """What a pickle of arrays and plain containers holds. Anything else in it is refused: pickles can run code."""
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="bytes").load()
    except OSError:
        raise
    except DataError as error:
        raise DataError(f"{path} {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path} is damaged ({error}): get it again") from error


def _latin1(text: str, encoding: str) -> bytes:
    """``_codecs.encode`` as far as pickles of bytes need it."""
    return text.encode("latin1")


_reconstruct: Callable[..., Any] = np.zeros(0).__reduce__()[0]  # type: ignore[assignment]

_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _latin1,
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Called for everything in a pickle that is not a plain container, a number or a string."""
        if (module, name) not in _ALLOWED:
            raise DataError(f"asks for {module}.{name}, which has no place in a file of images: it was not opened")
        return _ALLOWED[module, name]
