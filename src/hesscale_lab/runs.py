"""A run is a folder: what was asked for, in which environment, and what was measured, line by line as it was found."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hesscale

from . import durable

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
FORMERLY: Mapping[str, Any] = {"processes": 1, "options": {}, "plugin": None, "text": None}
"""What a config means that was written before there was such a key."""

_UNKNOWN = ("text",)
"""Keys of which None says that nobody knows, rather than that there is nothing."""


class OtherRunError(ValueError):
    """The folder holds a run of other settings."""


class DamagedRunError(ValueError):
    """A file of a run does not hold what was written there."""


@dataclass(frozen=True)
class Run:
    """A folder with config.json, environment.json and metrics.jsonl."""

    folder: Path

    @property
    def exists(self) -> bool:
        """Whether it was begun."""
        return (self.folder / CONFIG).exists()

    @property
    def environment(self) -> dict[str, Any]:
        """Where it was begun."""
        return dict(json.loads((self.folder / ENVIRONMENT).read_text(encoding="utf-8")))

    @property
    def config(self) -> dict[str, Any]:
        """The settings."""
        path = self.folder / CONFIG
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DamagedRunError(f"{path} is damaged: delete it to begin this run anew") from error

    @property
    def records(self) -> list[dict[str, Any]]:
        """Everything measured so far; a last line that is still being written is not part of it."""
        path = self.folder / METRICS
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [self._record(number, line) for number, line in enumerate(lines, start=1)]

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "kind" not in record:
            raise self.damaged(number)
        return record

    def damaged(self, number: int) -> DamagedRunError:
        """The error that says that this line, counted from 1, holds no measurement."""
        path = self.folder / METRICS
        return DamagedRunError(f"{path}, line {number}, is damaged: mend it, or delete the file to measure anew")

    def add(self, *records: Mapping[str, Any]) -> None:
        """Appends one line per record, all of them at once; on return they are on the disk."""
        durable.append(self.folder / METRICS, _lines(records))


def open_run(folder: Path, config: Mapping[str, Any], *, free: Collection[str] = ()) -> Run:
    """The run in this folder, begun or taken up again; OSError if it cannot be written, OtherRunError if it differs.

    Keys of the config that are ``free`` may differ; the folder's stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # found out before the work starts rather than after it
    with tempfile.TemporaryFile(dir=folder):
        pass
    run = Run(folder)
    if (folder / CONFIG).exists():
        require_same(run, config, free=free)
        _drop_half_a_line(folder / METRICS)
        return run
    (folder / METRICS).unlink(missing_ok=True)
    _write_json(folder / ENVIRONMENT, environment())
    _write_json(folder / CONFIG, config)  # with its config.json a run exists
    return run


def require_same(run: Run, config: Mapping[str, Any], *, free: Collection[str] = ()) -> None:
    """OtherRunError if the run's config is not this one, but for keys that are ``free``."""
    if differing := differences(config, run.config, free=free):
        raise OtherRunError(f"{run.folder} holds a run with other {', '.join(differing)}: choose another --out")


def differences(config: Mapping[str, Any], other: Mapping[str, Any], *, free: Collection[str] = ()) -> list[str]:
    """The keys in which two configs differ, but for those that are ``free`` and for what is not known."""
    wanted, found = ({**FORMERLY, **json.loads(json.dumps(one))} for one in (config, other))
    unknown = [key for key in _UNKNOWN if None in (wanted[key], found[key])]
    keys = [key for key in {**wanted, **found} if key not in free and key not in unknown]
    return [key for key in keys if wanted.get(key) != found.get(key)]


def amend(run: Run, **changes: Any) -> None:
    """Changes what the run's config says."""
    _write_json(run.folder / CONFIG, {**run.config, **changes})


def replace_records(run: Run, records: Iterable[Mapping[str, Any]]) -> None:
    """Makes these all that the run measured: those of the state that it goes on from."""
    path, lines = run.folder / METRICS, _lines(records)
    if not path.exists() or path.read_bytes() != lines:
        durable.replace(path, lines)


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    durable.replace(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _drop_half_a_line(path: Path) -> None:
    """An interrupt may have cut the last line off; what it stood for is measured again."""
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            durable.replace(path, whole)


def environment() -> dict[str, Any]:
    """What a result depends on, versions and threads."""
    return {
        "hesscale": hesscale.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    """Its name, where the system tells it, and the instructions torch uses on it."""
    source = Path("/proc/cpuinfo")
    lines = source.read_text(encoding="utf-8").splitlines() if source.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch computes with so many threads in here."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Torch computes with one thread in here: small networks gain nothing from more, and times vary less."""
    return threads(1)
