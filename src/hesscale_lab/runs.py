"""A run is a folder with its settings, its environment, and its measurements, one line of JSON each."""

from __future__ import annotations

import io
import json
import platform
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hesscale

from . import files

CONFIG, ENVIRONMENT, MEASUREMENTS = "config.json", "environment.json", "metrics.jsonl"
CHECKPOINT, WEIGHTS = "checkpoint.pt", "weights.pt"


class OtherRunError(ValueError):
    """The folder holds a run with other settings."""


class DamagedRunError(ValueError):
    """A file of a run does not hold what was written there."""


@dataclass(frozen=True)
class Run:
    """A folder with config.json, environment.json and metrics.jsonl."""

    folder: Path

    @property
    def exists(self) -> bool:
        """Whether the run was begun."""
        return (self.folder / CONFIG).exists()

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and machine when the run was begun."""
        return dict(json.loads((self.folder / ENVIRONMENT).read_text(encoding="utf-8")))

    @property
    def config(self) -> dict[str, Any]:
        """The settings."""
        path = self.folder / CONFIG
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedRunError(f"{path} is damaged: delete it to begin this run anew") from error

    @property
    def records(self) -> list[dict[str, Any]]:
        """All measurements; a last line without its end is still being written and left out."""
        path = self.folder / MEASUREMENTS
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [self._record(number, line) for number, line in enumerate(lines, start=1)]

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or "kind" not in record:
            raise self.damaged(number)
        return record

    def damaged(self, number: int) -> DamagedRunError:
        """The error that names this line, counted from 1, as no measurement."""
        path = self.folder / MEASUREMENTS
        return DamagedRunError(f"{path}, line {number}, is damaged: mend it, or delete the file to measure anew")

    def add(self, *records: Mapping[str, Any]) -> None:
        """Appends one line per record, all at once; when it returns, they are on the disk."""
        files.append(self.folder / MEASUREMENTS, _lines(records))


def open_run(folder: Path, config: Mapping[str, Any], *, free: Collection[str] = ()) -> Run:
    """The run in this folder, new or continued; OtherRunError if its settings differ, but for the ``free`` keys."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # fails now rather than after hours of work
        pass
    run = Run(folder)
    if run.exists:
        require_same(run, config, free=free)
        _drop_half_a_line(folder / MEASUREMENTS)
        return run
    (folder / MEASUREMENTS).unlink(missing_ok=True)
    _write_json(folder / ENVIRONMENT, environment())
    _write_json(folder / CONFIG, config)  # last, because with it the run exists
    return run


def require_same(run: Run, config: Mapping[str, Any], *, free: Collection[str] = ()) -> None:
    """OtherRunError if the run has another config, not counting the ``free`` keys."""
    if names := differences(config, run.config, free=free):
        raise OtherRunError(f"{run.folder} holds a run with other {', '.join(names)}: choose another --out")


def differences(config: Mapping[str, Any], other: Mapping[str, Any], *, free: Collection[str] = ()) -> list[str]:
    """The keys in which two configs differ, without the ``free`` ones."""
    first, second = (json.loads(json.dumps(one)) for one in (config, other))
    return [key for key in {**first, **second} if key not in free and first.get(key) != second.get(key)]


def amend(run: Run, **changes: Any) -> None:
    """Changes entries of the run's config."""
    _write_json(run.folder / CONFIG, {**run.config, **changes})


def replace_records(run: Run, records: Iterable[Mapping[str, Any]]) -> None:
    """Replaces all measurements of the run, by those of the checkpoint from which it continues."""
    path, lines = run.folder / MEASUREMENTS, _lines(records)
    if not path.exists() or path.read_bytes() != lines:
        files.replace(path, lines)


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    files.replace(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _drop_half_a_line(path: Path) -> None:
    """Removes a last line that an interrupt has cut off."""
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        files.replace(path, content[: content.rfind(b"\n") + 1])


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes tensors and plain containers to a file; if that fails, the file keeps its old content."""
    buffer = io.BytesIO()  # torch, given a file, hides the system's error, such as a full disk
    torch.save(state, buffer)
    files.replace(path, buffer.getvalue())


def load_state(path: Path) -> dict[str, Any] | None:
    """The state in a file; None if there is no file, DamagedRunError if it cannot be read."""
    if not path.exists():
        return None
    content = path.read_bytes()
    try:
        damaged = zipfile.ZipFile(io.BytesIO(content)).testzip()  # torch does not look at the checksums it writes
        state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch and pickle raise nearly anything
        raise damaged_state(path) from error
    if damaged:
        raise damaged_state(path)
    return state


def damaged_state(path: Path) -> DamagedRunError:
    """The error that says that the file is no state of this run."""
    return DamagedRunError(f"{path} is damaged, or of another run: delete it to train from the start")


def environment() -> dict[str, Any]:
    """Versions, processor and threads, on which a result may depend."""
    source = Path("/proc/cpuinfo")
    lines = source.read_text(encoding="utf-8").splitlines() if source.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "hesscale": hesscale.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }
