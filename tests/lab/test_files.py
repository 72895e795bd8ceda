"""Files that are whole whatever fails, and a folder for one process at a time; a killed one does not keep it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hesscale_lab import files
from hesscale_lab.files import InUseError, alone


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


HOLD = """
import sys, time
from pathlib import Path
from hesscale_lab.files import alone
with alone(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "mine\n"
    return process


def test_a_folder_in_use_is_refused_until_its_process_is_killed(tmp_path: Path) -> None:
    process = holder(tmp_path)
    with pytest.raises(InUseError, match=rf"^process {process.pid} on .* works in {tmp_path}: wait for its end"):
        alone(tmp_path).__enter__()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / files.LOCK).exists()  # which does not lock anything by itself
    with alone(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_whoever_waits_comes_next(tmp_path: Path) -> None:
    process, order = holder(tmp_path), []

    def wait() -> None:
        with alone(tmp_path, wait=True):
            order.append("waited")

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.2)
    order.append("killed")
    process.kill()
    process.communicate()
    thread.join(20)
    assert order == ["killed", "waited"]


def test_never_two_at_once(tmp_path: Path) -> None:
    """Many take turns; each deletes the file that the next one has opened already."""
    inside = [0]
    most = [0]

    def work() -> None:
        for _ in range(50):
            with alone(tmp_path, wait=True):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                os.sched_yield()
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, inside) == ([1], [0])


def test_a_file_system_without_locks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(place: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with alone(tmp_path):
        pass
