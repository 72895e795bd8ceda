"""``hesscale compact``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..compact import INDEX, TABLE
from ..compact import compact as compact_folder
from ..wording import counted
from .console import clear_errors, stop


def compact(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders with trainings, at any depth.")],
) -> None:
    """Store the finished trainings in a folder as two files, a table and an index, in place of many small ones.

    What was measured goes to DIR/runs.csv, which pandas can load, configurations and environments to DIR/runs.json.
    report, train and sweep read them as they read run folders. Runs that have not ended stay folders and can go on;
    weights stay where they are.

    \b
    Examples:
      hesscale compact runs/train
      hesscale compact results/train results/sweep
    """
    for folder in folders:
        if not folder.is_dir():
            stop(f"{folder} is not a folder", code=2)
    for folder in folders:
        with clear_errors(folder):
            found = compact_folder(folder)
        for line in found.left:
            typer.echo(f"hesscale: left as it is {line}", err=True)
        if found.count:
            typer.echo(f"{folder / TABLE} and {INDEX} hold {counted(found.count, 'run')}")
        else:
            typer.echo(f"no finished training in {folder}")
