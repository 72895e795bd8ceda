"""One process at a time in a run's folder, by a lock of the system's: it ends with its process, however that ends."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has none; nothing is locked there
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
"""The file that is locked. It may outlive a killed process; the lock does not."""

_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # by some network file systems


class InUseError(RuntimeError):
    """Another process works in the folder."""


@contextmanager
def alone(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Nobody else works in the folder in here. InUseError if somebody does, or ``wait`` until it is free."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    place = _lock(path, wait=wait)
    try:
        with suppress(OSError):  # only for the message to whoever is refused
            os.truncate(place, 0)
            os.write(place, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(place)


def _lock(path: Path, *, wait: bool) -> int:
    """The open file, locked. Whoever had the lock before deleted the file: then it is another's, or a new one."""
    while True:
        place = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock_file(place, path, wait=wait)
            if _is_at(path, place):
                return place
        except BaseException:
            os.close(place)
            raise
        os.close(place)


def _lock_file(place: int, path: Path, *, wait: bool) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(place, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        holder = path.read_text(errors="replace") or "another process"
        raise InUseError(f"{holder} works in {path.parent}: wait for its end, or stop it") from None
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


def _is_at(path: Path, place: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(place))
    except FileNotFoundError:
        return False
