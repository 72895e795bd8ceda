"""Finds data in the user's folder or in the cache, and downloads and checks it once if it is not there."""

from __future__ import annotations

import functools
import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_CIFAR = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True)
class Archive:
    """Files on the web, by name with their MD5 sums, and the folder below the data folder that they make."""

    title: str
    url: str
    folder: str
    needed: tuple[str, ...]  # what must be in the folder; with .gz counts too
    checksums: Mapping[str, str]
    packed: bool = False  # a tar file that makes the folder itself


ARCHIVES: Mapping[str, Archive] = {
    "mnist": Archive(
        "MNIST",
        _MNIST,
        "MNIST/raw",
        tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "cifar10": Archive(
        "CIFAR-10",
        _CIFAR,
        "cifar-10-batches-py",
        (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
        {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
        packed=True,
    ),
    "cifar100": Archive(
        "CIFAR-100",
        _CIFAR,
        "cifar-100-python",
        ("train", "test"),
        {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
        packed=True,
    ),
}

Fetch = Callable[..., Any]
"""pooch.retrieve, or what stands in for it."""


def folder_with(name: str, folder: Path | None, *, fetch: Fetch | None = None) -> Path:
    """The folder to read an archive from: the given one, or the cache after a download."""
    if folder is not None:
        return folder
    archive, folder = ARCHIVES[name], cache()
    if not is_there(archive, folder):
        download(archive, folder, fetch=fetch)
    return folder


def cache() -> Path:
    """Where downloads are kept; HESSCALE_DATA names another folder."""
    named = os.environ.get("HESSCALE_DATA")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hesscale"


def is_there(archive: Archive, folder: Path) -> bool:
    """Whether all files of an archive are in this folder."""
    inside = folder / archive.folder
    return all((inside / name).exists() or (inside / f"{name}.gz").exists() for name in archive.needed)


def download(archive: Archive, folder: Path, *, fetch: Fetch | None = None) -> None:
    """Downloads the files of an archive into a folder, and checks their MD5 sums."""
    try:
        fetch = fetch or _pooch()
        target = folder if archive.packed else folder / archive.folder
        for name, md5 in archive.checksums.items():
            unpack = {"processor": functools.partial(_unpack, folder)} if archive.packed else {}
            fetch(f"{archive.url}/{name}", known_hash=f"md5:{md5}", fname=name, path=target, **unpack)
    except Exception as error:  # no network, no space, a wrong sum: the way out is the same
        raise FileNotFoundError(f"cannot download {archive.title} ({_short(error)}): {_by_hand(archive)}") from error


def _pooch() -> Fetch:
    import pooch  # type: ignore[import-untyped, unused-ignore]

    pooch.get_logger().setLevel("ERROR")
    retrieve: Fetch = pooch.retrieve
    return retrieve


def _unpack(folder: Path, path: str, action: str, pup: Any) -> str:
    """A processor for pooch that unpacks a tar file into the folder."""
    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
    Path(path).unlink()  # as large as its content
    return path


def _short(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text if len(text) < 100 else f"{text[:97]}…"


def _by_hand(archive: Archive) -> str:
    files = " ".join(f"-O {archive.url}/{name}" for name in archive.checksums)
    if archive.packed:
        (name,) = archive.checksums
        return f"run `mkdir -p data && cd data && curl -L {files} && tar xf {name}` and add --data data"
    return f"run `mkdir -p data/{archive.folder} && cd data/{archive.folder} && curl -L {files}` and add --data data"
