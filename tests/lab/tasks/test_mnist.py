"""The reader of IDX files, on files made here."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from hesscale_lab.tasks import mnist
from hesscale_lab.tasks.networks import NETWORKS, sources


def write(folder: Path, part: str, count: int, *, packed: bool) -> None:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    sizes = b"".join(size.to_bytes(4, "big") for size in (count, 28, 28))
    images = (2051).to_bytes(4, "big") + sizes + bytes(i % 256 for i in range(count * 784))
    labels = (2049).to_bytes(4, "big") + count.to_bytes(4, "big") + bytes(i % 10 for i in range(count))
    for name, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
        path = raw / f"{name}.gz" if packed else raw / name
        path.write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_images_and_labels_come_back(packed: bool, tmp_path: Path) -> None:
    write(tmp_path, "t10k", 3, packed=packed)
    x, y = mnist.load(tmp_path, train=False)
    assert x.shape == (3, 784)
    assert y.tolist() == [0, 1, 2]
    assert (float(x.min()), float(x.max())) == (-1.0, 1.0)
    assert float(x[0, 5]) == pytest.approx(5 / 127.5 - 1)


def test_training_and_measured_examples_are_apart(tmp_path: Path) -> None:
    write(tmp_path, "train", 4, packed=True)
    write(tmp_path, "t10k", 2, packed=False)
    training, testing = sources(NETWORKS["mnist-tanh"], tmp_path)
    generator = torch.Generator().manual_seed(0)
    assert set(training(50, generator)[1].tolist()) == {0, 1, 2, 3}
    assert set(testing(50, generator)[1].tolist()) == {0, 1}


def test_files_that_are_not_what_they_should_be_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x00\x00\x00\x01abc")
    with pytest.raises(ValueError, match="no IDX file"):
        mnist.read_idx(path)
    path.write_bytes((2049).to_bytes(4, "big") + (9).to_bytes(4, "big") + b"abc")
    with pytest.raises(ValueError, match="cut short"):
        mnist.read_idx(path)
