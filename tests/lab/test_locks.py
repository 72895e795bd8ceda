"""One process at a time in a folder; a killed one does not keep it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hesscale_lab import files as locks
from hesscale_lab.files import InUseError, alone

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
    assert (tmp_path / locks.LOCK).exists()  # which does not lock anything by itself
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
