"""Files of data: read as they are, refused in one sentence when damaged, missing or dangerous, downloaded at need."""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import pickle
import tarfile
import threading
from dataclasses import replace
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hesscale_lab.tasks import download
from hesscale_lab.tasks.archives import DataError, read_cifar10, read_cifar100, read_idx, read_mnist, read_pickle
from hesscale_lab.tasks.download import ARCHIVES, folder_with, is_there
from hesscale_lab.tasks.networks import NETWORKS, sources

from ..small_archives import write_cifar, write_mnist


def test_images_and_labels_come_back(tmp_path: Path) -> None:
    write_mnist(tmp_path, 12)
    write_cifar(tmp_path, 4, classes=10)
    write_cifar(tmp_path, 6, classes=100)
    images, labels = read_mnist(tmp_path, train=True)
    assert (tuple(images.shape), labels[:3].tolist()) == ((12, 1, 28, 28), [0, 1, 2])
    images, labels = read_cifar10(tmp_path, train=True)
    assert (tuple(images.shape), labels.tolist()) == ((20, 3, 32, 32), [0, 1, 2, 3] * 5)
    first = read_pickle(tmp_path / "cifar-10-batches-py" / "data_batch_1")[b"data"][0]
    assert np.array_equal(images[0].flatten().numpy(), first)  # red, green and blue planes follow one another
    assert read_cifar10(tmp_path, train=False)[0].shape == (4, 3, 32, 32)
    assert read_cifar100(tmp_path, train=False)[1].tolist() == list(range(6))


@pytest.mark.parametrize("read", [read_mnist, read_cifar10, read_cifar100])
def test_a_missing_file_says_what_to_do(read: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is missing: point --data at a folder with"):
        read(tmp_path, train=True)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:9] + b"\xff" * 40, None])
def test_a_damaged_file_is_named(damage: Any, tmp_path: Path) -> None:
    write_mnist(tmp_path, 12)
    write_cifar(tmp_path, 4, classes=100)
    mnist = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    cifar = tmp_path / "cifar-100-python" / "test"
    for path, read in ((mnist, read_mnist), (cifar, read_cifar100)):
        path.write_bytes(damage(path.read_bytes()) if damage else b"")
        with pytest.raises(DataError, match=path.name) as caught:
            read(tmp_path, train=False)
        assert "\n" not in str(caught.value)


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = tmp_path / "cifar-100-python" / "train"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps({b"data": Trap()}))
    with pytest.raises(DataError, match=r"asks for posix\.mkdir"):
        read_cifar100(tmp_path, train=True)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "content, complaint",
    [
        ([1, 2], "does not hold CIFAR's images"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "does not hold CIFAR's images"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [1]}, "2 images for 1 labels"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [100]}, "labels from 100 to 100"),
    ],
)
def test_a_pickle_of_something_else_is_refused(content: Any, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "cifar-100-python" / "train"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=complaint):
        read_cifar100(tmp_path, train=True)


def packed(folder: Path) -> tuple[download.Archive, Path]:
    """CIFAR-100's archive in miniature, and the folder it stands in for the web."""
    write_cifar(folder / "made", 2, classes=100)
    web = folder / "web"
    web.mkdir()
    with tarfile.open(web / "cifar-100-python.tar.gz", "w:gz") as tar:
        tar.add(folder / "made" / "cifar-100-python", "cifar-100-python")
    md5 = hashlib.md5((web / "cifar-100-python.tar.gz").read_bytes()).hexdigest()
    return replace(ARCHIVES["cifar100"], url=str(web), checksums={"cifar-100-python.tar.gz": md5}), web


def copy(url: str, *, known_hash: str, fname: str, path: Path, processor: Any = None) -> None:
    """What pooch.retrieve does, without the web."""
    data = Path(url).read_bytes()
    if known_hash != f"md5:{hashlib.md5(data).hexdigest()}":
        raise ValueError("the hash does not match")
    path.mkdir(parents=True, exist_ok=True)
    (path / fname).write_bytes(data)
    if processor is not None:
        processor(str(path / fname), "download", None)


def test_data_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, web = packed(tmp_path)
    monkeypatch.setenv("HESSCALE_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "ARCHIVES", {"cifar100": archive})
    assert folder_with("cifar100", tmp_path / "mine") == tmp_path / "mine"  # as it is
    assert folder_with("cifar100", None, fetch=copy) == tmp_path / "cache"
    assert is_there(archive, tmp_path / "cache")
    assert len(read_cifar100(tmp_path / "cache", train=True)[1]) == 2
    (web / "cifar-100-python.tar.gz").unlink()
    folder_with("cifar100", None, fetch=copy)


def test_a_download_that_fails_says_how_to_do_it_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, web = packed(tmp_path)
    (web / "cifar-100-python.tar.gz").write_bytes(b"something else")
    monkeypatch.setenv("HESSCALE_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "ARCHIVES", {"cifar100": archive})
    with pytest.raises(FileNotFoundError, match=r"hash does not match.*curl .* and add --data") as caught:
        folder_with("cifar100", None, fetch=copy)
    assert "\n" not in str(caught.value)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *message: object) -> None: ...


def test_pooch_fetches_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pooch")
    monkeypatch.setenv("no_proxy", "*")
    archive, web = packed(tmp_path)
    with HTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=web)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        download.download(replace(archive, url=url), tmp_path / "cache")
        with pytest.raises(FileNotFoundError, match="cannot download CIFAR-100"):
            wrong = dict.fromkeys(archive.checksums, "0" * 32)
            download.download(replace(archive, url=url, checksums=wrong), tmp_path / "other")
        server.shutdown()
    assert is_there(archive, tmp_path / "cache")
    assert not is_there(archive, tmp_path / "other")


@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_the_study_of_quality_draws_pixels_from_minus_1_to_1(packed: bool, tmp_path: Path) -> None:
    write_mnist(tmp_path, 9)
    for path in () if packed else [*tmp_path.rglob("*.gz")]:
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    training, testing = sources(NETWORKS["mnist-tanh"], tmp_path)
    (images, labels), (x, y) = read_mnist(tmp_path, train=True), training(200, torch.Generator().manual_seed(0))
    assert x.shape == (200, 784) and set(y.tolist()) == set(range(9))
    first = int(y[0])
    assert labels[first] == first and torch.equal(x[0], images[first].flatten().double() / 127.5 - 1)
    assert not torch.equal(testing(200, torch.Generator().manual_seed(0))[0], x)


def test_files_that_are_no_idx_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    bad = {b"\0\0\0\1abc": "no IDX file", b"\0\0\x08\1\0\0\0\x09abc": "cut short"}
    for content, complaint in bad.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=complaint):
            read_idx(path)
