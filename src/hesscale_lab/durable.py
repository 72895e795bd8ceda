"""Files that are whole: after a kill, a power cut or a full disk they hold what they were given, or what they held."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Puts the content in the file's place at once; if that fails or is interrupted, the file is as it was."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        _write(fresh, "wb", content)
        os.replace(fresh, path)
        _sync_folder(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def append(path: Path, content: bytes) -> None:
    """Adds the content at the end of the file, all of it or nothing; on return it is on the disk."""
    before = path.stat().st_size if path.exists() else None
    try:
        _write(path, "ab", content)
        if before is None:
            _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            os.truncate(path, before or 0)
        raise


def _write(path: Path, mode: str, content: bytes) -> None:
    rest = memoryview(content)
    with path.open(mode, buffering=0) as file:  # a buffer would be written again on closing
        while rest:
            rest = rest[file.write(rest) :]  # a disk that fills up takes a part, and the next write fails
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """A file's name is part of its folder, which is on the disk only when it was told to be."""
    with suppress(OSError):  # some systems open no folders
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
