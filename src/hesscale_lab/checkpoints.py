"""The state of a training in one file, which is always whole: a new one takes the old one's place at once."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

NAME = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Writes the state; if that fails or is interrupted, the one before it stays as it was."""
    fresh = folder / f"{NAME}.new"
    try:
        with fresh.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, folder / NAME)
    except RuntimeError as error:  # torch hides what the system said, such as that the disk is full
        raise OSError(f"the checkpoint could not be written ({error})") from error
    finally:
        fresh.unlink(missing_ok=True)


def load(folder: Path) -> dict[str, Any] | None:
    """The last state that was saved, if there is one."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise OSError(f"{path} is damaged: delete it to train from the start") from error
    return state


def remove(folder: Path) -> None:
    """Deletes the state, once it is not needed any more."""
    (folder / NAME).unlink(missing_ok=True)
