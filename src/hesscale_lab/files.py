"""Files that survive a kill, a power cut or a full disk, and a lock that lets one process at a time use a folder."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""The file that is locked. It may outlive a killed process; the lock does not."""

_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # some network file systems


class InUseError(RuntimeError):
    """Another process uses the folder."""


def replace(path: Path, content: bytes) -> None:
    """Replaces the content of a file at once; if that fails or is interrupted, the file keeps its old content."""
    new = path.with_name(f"{path.name}.new")
    try:
        _write(new, "wb", content)
        os.replace(new, path)
        _sync_folder(path.parent)
    finally:
        new.unlink(missing_ok=True)


def append(path: Path, content: bytes) -> None:
    """Appends all of the content or nothing; when it returns, the content is on the disk."""
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
    with path.open(mode, buffering=0) as file:  # closing a buffered file would try to write again
        while rest:
            rest = rest[file.write(rest) :]  # a full disk takes a part, and the next write fails
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Writes the folder itself, which holds the names of its files, to the disk."""
    with suppress(OSError):  # some systems cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def alone(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Locks the folder. If another process has it, raises InUseError, or waits until the folder is free."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    descriptor = _locked(path, wait=wait)
    try:
        with suppress(OSError):  # the text only serves the message of InUseError
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path, *, wait: bool) -> int:
    """The descriptor of the locked file. The previous owner deleted its file, so the lock may be on a deleted one."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, path, wait=wait)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path, *, wait: bool) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        owner = path.read_text(errors="replace") or "another process"
        raise InUseError(f"{owner} works in {path.parent}: wait for its end, or stop it") from None
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
