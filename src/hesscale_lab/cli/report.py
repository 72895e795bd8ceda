"""``hesscale report`` and ``hesscale compact``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..compact import INDEX, TABLE
from ..compact import compact as compact_folder
from ..report.collect import collect
from ..report.write import write
from ..wording import counted
from .console import clear_errors, name_left_out, stop


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders with runs, at any depth.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, the figures and the numbers.")] = Path("report"),
) -> None:
    """Draw finished runs: learning curves, sensitivity, wins and losses per second, as one HTML page and as CSV.

    Reads run folders only and never trains. Studies in the folders (quality, cost) are drawn as well. A run that cannot
    be read is named and left out.

    \b
    Examples:
      hesscale report runs
      hesscale report runs/mnist-mlp results/quality --out report
    """
    _require_folders(folders)
    with clear_errors(out):
        collection = collect(folders)
    name_left_out(collection.left_out)
    if not collection.experiments and not collection.studies:
        names = ", ".join(map(str, folders))
        stop(f"no run to report on in {names}: `hesscale train` and `hesscale sweep` make them", code=1)
    with clear_errors(out):
        written = write(collection, out)
        name_left_out(written.left_out)
        for path in written.paths:
            typer.echo(f"wrote {path}")


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
    _require_folders(folders)
    for folder in folders:
        with clear_errors(folder):
            count, left = compact_folder(folder)
        for line in left:
            typer.echo(f"hesscale: left as it is {line}", err=True)
        if count:
            typer.echo(f"{folder / TABLE} and {INDEX} hold {counted(count, 'run')}")
        else:
            typer.echo(f"no finished training in {folder}")


def _require_folders(folders: list[Path]) -> None:
    for folder in folders:
        if not folder.is_dir():
            stop(f"{folder} is not a folder", code=2)
