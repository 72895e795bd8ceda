"""Many trainings at once on Ray: one task per run, on this machine or on a cluster.

Only folders travel: a worker trains in the run's folder, and the driver reads there how far it is. So nothing is lost
with a worker, nor with the driver: the run goes on from its checkpoint, in a new worker or at the next call.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from .compact import find_run
from .histories import State, is_finished, read_history
from .memory import keep_freed_memory
from .plugins import Plugin, PluginFailure
from .runs import FORMERLY
from .runs import threads as with_threads
from .settings import Settings, folder_of
from .training import train as train_one

RETRIES = 3
"""How often the run of a lost worker (killed, out of memory, its machine gone) is taken up by another."""

_BETWEEN_LOOKS, _TIMEOUT = 0.5, 10.0  # seconds
_OBJECT_STORE = 100 * 2**20  # bytes; only paths and settings travel, and Ray would take a third of the memory
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

Train = Callable[..., Any]
_train_when_free = partial(train_one, wait=True)


class WorkersError(RuntimeError):
    """Ray is missing or cannot be reached."""


class Standing(StrEnum):
    """How a run stands, in the order in which a run passes through."""

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
    standing: Standing
    epoch: int | None = None
    valid_loss: float | None = None
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is a result; a failed run has none."""
        return self.standing in (Standing.FINISHED, Standing.NOT_FINITE)


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
    """How each of these runs ended, in their order. One that failed does not stop the others.

    ``address``: a Ray cluster whose machines all see ``root`` and ``data`` at the same paths; without it the runs stay
    here. ``workers``: how many run at once, else as many as there are cores for, with ``threads`` each. ``watch`` is
    told twice a second how all of them stand. Finished runs are not touched, and if all are, Ray is not even started.
    A run in which another process is at work, be it a worker that was given up for lost, waits for its end.
    """
    root, data = root.absolute(), data.absolute() if data else None  # a worker may be elsewhere
    board = {one: standing_of(one, folder_of(one, root)) for one in settings}
    tell = watch or (lambda progress: None)
    tell(list(board.values()))
    missing = [one for one, progress in board.items() if not progress.has_ended]
    if missing:
        with cluster(address, workers=workers, threads=threads) as room:
            _run(missing, board, room, data=data, threads=threads, train=train, tell=tell)
    return list(board.values())


def _run(
    missing: Sequence[Settings],
    board: dict[Settings, Progress],
    room: int,
    *,
    data: Path | None,
    threads: int,
    train: Train,
    tell: Watch,
) -> None:
    """Hands out as many at a time as there is room for, so that what was handed out is what runs."""
    import ray

    remote = ray.remote(num_cpus=threads, max_retries=RETRIES, retry_exceptions=False)(_work)
    waiting = list(reversed(missing))
    running: dict[Any, Settings] = {}
    while waiting or running:
        while waiting and len(running) < room:
            one = waiting.pop()
            running[remote.remote(train, one, board[one].folder, data, threads)] = one
        done, _ = ray.wait(list(running), timeout=_BETWEEN_LOOKS)
        for reference in done:
            one = running.pop(reference)
            board[one] = _outcome(one, board[one].folder, _error_of(reference))
        for one in running.values():
            board[one] = standing_of(one, board[one].folder, otherwise=Standing.RUNNING)
        tell(list(board.values()))


def _work(train: Train, settings: Settings, folder: Path, data: Path | None, threads: int) -> str | None:
    """Trains, in a worker. An error comes back as one line: only a lost worker shall make Ray try again."""
    keep_freed_memory()
    with with_threads(threads):
        try:
            train(settings, folder, data=data)
        except Exception as error:
            text = " ".join(str(error).split())
            return (
                text
                if isinstance(error, OSError | ValueError | PluginFailure) and text
                else f"{type(error).__name__}: {text}"
            )
    return None


def _error_of(reference: Any) -> str | None:
    import ray

    try:
        error: str | None = ray.get(reference)
    except ray.exceptions.RayError as lost:
        return f"its worker was lost {RETRIES + 1} times ({type(lost).__name__})"
    return error


def _outcome(settings: Settings, folder: Path, error: str | None) -> Progress:
    found = standing_of(settings, folder)
    if error is None and found.has_ended:
        return found
    return Progress(settings, folder, Standing.FAILED, found.epoch, found.valid_loss, error or "it did not end")


def standing_of(settings: Settings, folder: Path, *, otherwise: Standing = Standing.WAITING) -> Progress:
    """How a run stands by what is in its folder; ``otherwise`` if it has not ended."""
    try:
        run = find_run(folder)
        if not run.exists or not _are_alike(settings_of(run.config), settings):
            return Progress(settings, folder, otherwise)
        history = read_history(run)
        if is_finished(run):
            broke = history is None or history.state is State.NOT_FINITE
            otherwise = Standing.NOT_FINITE if broke else Standing.FINISHED
    except (ValueError, LookupError, TypeError, AttributeError):  # not a run; training says what is wrong with it
        return Progress(settings, folder, otherwise)
    if history is None:
        return Progress(settings, folder, otherwise)
    return Progress(settings, folder, otherwise, history.epochs, history.values["valid_loss"][-1])


def _are_alike(found: Settings, wanted: Settings) -> bool:
    """Whether they are the same, as far as is known of the text."""
    text = wanted.text or found.text
    return replace(found, text=found.text or text) == replace(wanted, text=text)


def settings_of(config: Mapping[str, Any]) -> Settings:
    """The settings that a run's config.json holds."""
    config = {**FORMERLY, **config}
    known = {field.name: config[field.name] for field in fields(Settings)}
    pairs = {name: tuple(sorted(known[name].items())) for name in ("fields", "options")}
    plugin = known["plugin"] and Plugin(**known["plugin"])
    return Settings(**{**known, **pairs, "plugin": plugin})


@contextmanager
def cluster(address: str | None = None, *, workers: int | None = None, threads: int = 1) -> Iterator[int]:
    """How many runs fit at once, with Ray started in here; a Ray that was there before is used and left as it is."""
    ray = _ray()
    if ray.is_initialized():
        room = _room(ray, threads)
        yield workers or room
        return
    try:
        try:
            _start(ray, address, None if workers is None else workers * threads, least=threads)
        except (OSError, RuntimeError, ValueError) as error:
            where = f"cannot join a Ray cluster at {address}" if address else "Ray does not start"
            # Ray says only that it failed to connect, even where it was turned away
            hint = "; if it wants a token, set RAY_AUTH_MODE=token" if address else ""
            raise WorkersError(f"{where}: {' '.join(str(error).split())}{hint}") from error
        room = _room(ray, threads)
        yield workers or room
    finally:
        ray.shutdown()


def _start(ray: Any, address: str | None, cores: int | None, *, least: int) -> None:
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if address:
        _knock(address)
        ray.init(address, **quiet)
    else:  # "local" because without an address Ray would join whatever cluster RAY_ADDRESS names
        cores = cores or max(least, os.cpu_count() or 1)
        local = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
        ray.init("local", **quiet, **local)


def _knock(address: str) -> None:
    """OSError if nobody listens there: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_TIMEOUT).close()


def _room(ray: Any, threads: int) -> int:
    """How many runs of so many threads fit on the machines; WorkersError if none does: Ray would wait for ever."""
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    room = sum(count // threads for count in cores)
    if not room:
        raise WorkersError(
            f"no machine has {threads} cores for Ray (at most {max(cores, default=0)}): ask for fewer --threads"
        )
    return room


def _ray() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise WorkersError("sweeps run on Ray, which is not installed: pip install 'hesscale[lab]'") from error
    return ray
