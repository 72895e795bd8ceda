"""``hesscale report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..report.collect import collect
from ..report.write import write
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
    for folder in folders:
        if not folder.is_dir():
            stop(f"{folder} is not a folder", code=2)
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
