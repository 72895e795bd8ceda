"""A run is a folder: what was asked for, in which environment, and what was measured, line by line as it was found."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        """Everything measured so far."""
        path = self.folder / METRICS
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

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
    for name, content in ((CONFIG, wanted), (ENVIRONMENT, environment())):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / METRICS).unlink(missing_ok=True)
    return run


def _drop_half_a_line(path: Path) -> None:
    """An interrupt may have cut the last line off; what it stood for is measured again."""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def environment() -> dict[str, Any]:
    """What a result depends on, versions and threads."""
    return {
        "hesscale": hesscale.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread in here: small networks gain nothing from more, and times vary less."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
