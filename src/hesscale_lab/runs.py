"""A run is a folder: what was measured, by which command and in which environment, as files one can read anywhere."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import hesscale


def open_run(folder: Path) -> Path:
    """The same folder, made if need be and known to be writable; OSError if not."""
    folder.mkdir(parents=True, exist_ok=True)
    # found out before the work starts rather than after it
    with tempfile.TemporaryFile(dir=folder):
        return folder


def environment() -> dict[str, str]:
    """The versions a result depends on."""
    return {
        "hesscale": hesscale.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def write_record(path: Path, *, command: str, results: Mapping[str, Any]) -> Path:
    """The path of a JSON file with ``results`` and what is needed to get them again."""
    record = {"command": command, "environment": environment(), **results}
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
