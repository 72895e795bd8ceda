"""Many trainings at once on Ray: one task per run, on this machine or on a cluster.

A worker trains in the run's folder, and the driver reads the folder to see the progress. So a lost worker or driver
loses nothing: the run continues from its checkpoint, in another worker or at the next call.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from .compact import find_run
from .histories import State, is_finished, read_history
from .plugins import PluginFailure
from .processes import keep_freed_memory
from .processes import threads as with_threads
from .settings import Settings, folder_of, settings_of
from .training import train as train_one
from .wording import one_line

RETRIES = 3
"""How often another worker takes up the run of a lost one (killed, out of memory, its machine gone)."""

_BETWEEN_LOOKS, _TIMEOUT = 0.5, 10.0  # seconds
_OBJECT_STORE = 100 * 2**20  # bytes; only paths and settings are sent, and Ray would take a third of the memory
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

Train = Callable[..., Any]
_train_when_free = partial(train_one, wait=True)


class WorkersError(RuntimeError):
    """Ray is missing or cannot be reached."""


class Status(StrEnum):
    """The status of a run, in the order in which a run passes through."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    NOT_FINITE = "not finite"
    FAILED = "failed"


@dataclass(frozen=True)
class Progress:
    """One run among many."""

    settings: Settings
    folder: Path
    status: Status
    epoch: int | None = None
    valid_loss: float | None = None
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is a result; a failed run has none."""
        return self.status in (Status.FINISHED, Status.NOT_FINITE)


Watch = Callable[[Sequence[Progress]], None]


def run_all(
    settings: Sequence[Settings],
    root: Path,
    *,
    data: Path | None = None,
    address: str | None = None,
    workers: int | None = None,
    threads: int = 1,
    watch: Watch | None = None,
    train: Train = _train_when_free,
) -> list[Progress]:
    """The outcome of each of these runs, in their order. A failed run does not stop the others.

    ``address``: a Ray cluster whose machines all see ``root`` and ``data`` at the same paths; without it the runs stay
    on this machine. ``workers``: how many runs at once; by default as many as there are cores, with ``threads`` each.
    ``watch`` gets the progress of all runs twice a second. Finished runs are not touched, and Ray is not started if all
    are finished. A run that another process has locked waits for its end.
    """
    root, data = root.absolute(), data.absolute() if data else None  # a worker may have another current folder
    board = {one: progress_of(one, folder_of(one, root)) for one in settings}
    tell = watch or (lambda progress: None)
    tell(list(board.values()))
    waiting = [one for one, progress in reversed(board.items()) if not progress.has_ended]
    if not waiting:
        return list(board.values())
    with cluster(address, workers=workers, threads=threads) as slots:
        import ray

        remote = ray.remote(num_cpus=threads, max_retries=RETRIES, retry_exceptions=False)(_work)
        running: dict[Any, Settings] = {}
        while waiting or running:
            while waiting and len(running) < slots:  # no more than can run, so that RUNNING is true
                one = waiting.pop()
                running[remote.remote(train, one, board[one].folder, data, threads)] = one
            done, _ = ray.wait(list(running), timeout=_BETWEEN_LOOKS)
            for reference in done:
                one = running.pop(reference)
                board[one] = _outcome(board[one], reference)
            for one in running.values():
                board[one] = progress_of(one, board[one].folder, otherwise=Status.RUNNING)
            tell(list(board.values()))
    return list(board.values())


def _work(train: Train, settings: Settings, folder: Path, data: Path | None, threads: int) -> str | None:
    """Trains, in a worker. Returns an error as one line: Ray shall retry only when the worker is lost."""
    keep_freed_memory()
    with with_threads(threads):
        try:
            train(settings, folder, data=data)
        except Exception as error:
            text = " ".join(str(error).split())
            return text if isinstance(error, OSError | ValueError | PluginFailure) and text else one_line(error)
    return None


def _outcome(before: Progress, reference: Any) -> Progress:
    import ray

    try:
        error: str | None = ray.get(reference)
    except ray.exceptions.RayError as lost:
        error = f"its worker was lost {RETRIES + 1} times ({type(lost).__name__})"
    now = progress_of(before.settings, before.folder)
    if error is None and now.has_ended:
        return now
    return replace(now, status=Status.FAILED, error=error or "it did not end")


def progress_of(settings: Settings, folder: Path, *, otherwise: Status = Status.WAITING) -> Progress:
    """The progress of a run, read from its folder; its status is ``otherwise`` if the run has not ended."""
    waiting = Progress(settings, folder, otherwise)
    try:
        run = find_run(folder)
        if not run.exists:
            return waiting
        known = settings_of(run.config)
        if known != replace(settings, text=settings.text or known.text):
            return waiting
        history, finished = read_history(run), is_finished(run)
    except (ValueError, LookupError, TypeError, AttributeError):  # training will say what is wrong
        return waiting
    if finished:
        broke = history is None or history.state is State.NOT_FINITE
        waiting = replace(waiting, status=Status.NOT_FINITE if broke else Status.FINISHED)
    if history is None:
        return waiting
    return replace(waiting, epoch=history.epochs, valid_loss=history.values["valid_loss"][-1])


@contextmanager
def cluster(address: str | None = None, *, workers: int | None = None, threads: int = 1) -> Iterator[int]:
    """Starts Ray, or uses the Ray that is there already; yields how many runs fit at once."""
    ray = _ray()
    if ray.is_initialized():
        slots = _slots(ray, threads)
        yield workers or slots
        return
    try:
        try:
            _start(ray, address, None if workers is None else workers * threads, least=threads)
        except (OSError, RuntimeError, ValueError) as error:
            where = f"cannot join a Ray cluster at {address}" if address else "Ray does not start"
            hint = "; if it wants a token, set RAY_AUTH_MODE=token" if address else ""  # Ray does not say so
            raise WorkersError(f"{where}: {' '.join(str(error).split())}{hint}") from error
        slots = _slots(ray, threads)
        yield workers or slots
    finally:
        ray.shutdown()


def _start(ray: Any, address: str | None, cores: int | None, *, least: int) -> None:
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if address:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # fails at once if nobody listens there; Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=_TIMEOUT).close()
        ray.init(address, **quiet)
    else:  # without "local" Ray would join the cluster that RAY_ADDRESS names
        cores = cores or max(least, os.cpu_count() or 1)
        ray.init("local", **quiet, num_cpus=cores, include_dashboard=False, object_store_memory=_OBJECT_STORE)


def _slots(ray: Any, threads: int) -> int:
    """How many runs with this many threads fit on the machines; WorkersError if none does: Ray would wait for ever."""
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    slots = sum(count // threads for count in cores)
    if not slots:
        raise WorkersError(
            f"no machine has {threads} cores for Ray (at most {max(cores, default=0)}): ask for fewer --threads"
        )
    return slots


def _ray() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise WorkersError("sweeps run on Ray, which is not installed: pip install 'hesscale[lab]'") from error
    return ray
