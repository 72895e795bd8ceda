"""The state of a training in one file, which is always whole: a new one takes the old one's place at once."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from . import durable
from .runs import DamagedRunError

NAME, WEIGHTS = "checkpoint.pt", "weights.pt"


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes the state; if that fails or is interrupted, the one before it stays as it was."""
    buffer = io.BytesIO()  # torch, given a file, hides what the system said, such as that the disk is full
    torch.save(state, buffer)
    durable.replace(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any] | None:
    """The last state that was saved, if there is one."""
    if not path.exists():
        return None
    content = path.read_bytes()
    try:
        wrong = zipfile.ZipFile(io.BytesIO(content)).testzip()  # torch itself does not look at the checksums it writes
        state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # whatever torch and pickle make of bytes that are not theirs
        raise damaged(path) from error
    if wrong:
        raise damaged(path)
    return state


def remove(folder: Path) -> None:
    """Deletes the state of a run that needs it no more."""
    (folder / NAME).unlink(missing_ok=True)


def damaged(path: Path) -> DamagedRunError:
    """The error that says that the file is not what a training left there."""
    return DamagedRunError(f"{path} is damaged, or of another run: delete it to train from the start")
