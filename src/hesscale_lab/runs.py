"""A run is a folder: what was asked for, in which environment, and what was measured, line by line as it was found."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hesscale

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"


class OtherRunError(ValueError):
    """The folder holds a run of other settings."""


@dataclass(frozen=True)
class Run:
    """A folder with config.json, environment.json and metrics.jsonl."""

    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """The settings."""
        return dict(json.loads((self.folder / CONFIG).read_text(encoding="utf-8")))

    @property
    def records(self) -> list[dict[str, Any]]:
        """Everything measured so far; a last line that is still being written is not part of it."""
        path = self.folder / METRICS
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def add(self, *records: Mapping[str, Any]) -> None:
        """Appends one line per record, all of them at once."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(lines)


def open_run(folder: Path, config: Mapping[str, Any]) -> Run:
    """The run in this folder, begun or taken up again; OSError if it cannot be written, OtherRunError if it differs."""
    folder.mkdir(parents=True, exist_ok=True)
    # found out before the work starts rather than after it
    with tempfile.TemporaryFile(dir=folder):
        pass
    run = Run(folder)
    wanted = json.loads(json.dumps(config))
    if (folder / CONFIG).exists():
        differing = [key for key in {**wanted, **run.config} if wanted.get(key) != run.config.get(key)]
        if differing:
            raise OtherRunError(f"{folder} holds a run with other {', '.join(differing)}: choose another --out")
        _drop_half_a_line(folder / METRICS)
        return run
    (folder / METRICS).unlink(missing_ok=True)
    for name, content in ((ENVIRONMENT, environment()), (CONFIG, wanted)):  # with its config.json a run exists
        _replace(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return run


def keep_records(run: Run, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drops what was measured after the state that a run goes on from."""
    kept = [record for record in run.records if wanted(record)]
    if len(kept) != len(run.records):
        _replace(run.folder / METRICS, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def _replace(path: Path, text: str) -> None:
    """Writes a file that is never half there."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _drop_half_a_line(path: Path) -> None:
    """An interrupt may have cut the last line off; what it stood for is measured again."""
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.truncate(path, whole)


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
