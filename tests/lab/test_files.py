"""Files that are whole, whatever fails on the way."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hesscale_lab import files


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: the system takes a part of a write and refuses the next."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [files.append, files.replace])
@pytest.mark.parametrize("before", [None, b"first\n"])
def test_a_full_disk_leaves_the_file_as_it_was(
    write: Callable[[Path, bytes], None], before: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    with disk_of(4096), pytest.raises(OSError, match="File too large"):
        write(path, b"x" * 10_000)
    assert (path.read_bytes() if path.exists() else b"") == (before or b"")
    assert not list(tmp_path.glob("*.new"))
    write(path, b"second\n")
    assert path.read_bytes() == (b"second\n" if write is files.replace else (before or b"") + b"second\n")


@pytest.mark.parametrize("write", [files.append, files.replace])
def test_what_was_written_is_on_the_disk_before_anything_else_happens(
    write: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []

    def fsync(file: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{file}"))
        synced.append(place.read_bytes() if place.is_file() else b"the folder")

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "file", b"content")
    assert synced == [b"content", b"the folder"]


def test_an_error_while_syncing_takes_the_line_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    files.append(path, b"first\n")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.append(path, b"second\n")
    assert path.read_bytes() == b"first\n"
