"""``hesscale report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..report.collect import collect
from ..report.write import write
from .console import clear_errors, stop


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders with runs, at any depth.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and the figures.")] = Path("report"),
) -> None:
    """Draw finished runs: learning curves, sensitivity, tables with standard errors, as one HTML page.

    Reads run folders only and never trains. Figures of other studies in the folders (quality, cost) are shown as well.

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
    for line in collection.left_out:
        typer.echo(f"hesscale: left out {line}", err=True)
    if not collection.experiments and not collection.studies:
        names = ", ".join(map(str, folders))
        stop(f"no run to report on in {names}: `hesscale train` and `hesscale sweep` make them", code=1)
    with clear_errors(out):
        for path in write(collection, out):
            typer.echo(f"wrote {path}")
