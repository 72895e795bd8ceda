"""What the commands of studies share: their tables in the terminal, their figures in the run folder."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.table import Table

from ..plots.drawn import save
from ..report.kinds import Kind
from ..runs import Run
from ..studies.reading import Record, read
from .console import show, stop


def show_study(run: Run, kind: Kind) -> None:
    """Prints the tables of a study, and draws its figures into its folder."""
    records = read(run, kind.checks).records
    try:
        tables = tuple(kind.tables(run.config, records))
    except ValueError as error:
        stop(f"the records in {run.folder} do not go together ({error}): choose another --out", code=1)
    for table in tables:
        show(Table(title=table.title, caption=table.note or None), table.headings, table.rows)
    draw(run, kind, records)


def draw(run: Run, kind: Kind, records: Sequence[Record]) -> None:
    """Writes the figures of a study into its folder."""
    for drawn in kind.figures(run.config, records):
        for path in save(drawn.figure, run.folder / drawn.name):
            typer.echo(f"wrote {path}")
