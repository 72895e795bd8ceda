"""``hesscale study``, and what the commands of studies share: tables in the terminal, figures in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .. import durable
from ..locks import alone
from ..plots.drawn import save
from ..report.kind import Kind
from ..runs import Run, one_thread, open_run
from ..studies.reading import Record, read
from ..study_table import STUDIES, Study
from .console import clear_errors, name_left_out, progress_bar, show, stop

StudyName = StrEnum("StudyName", {name: name for name in STUDIES})  # type: ignore[misc]
_NAMES = "; ".join(f"{name}: {row.summary}" for name, row in STUDIES.items())


def study(
    name: Annotated[StudyName, typer.Argument(help=f"{_NAMES}.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small version, in some minutes.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with data as torchvision makes it [default: downloaded]; some need none."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/NAME/full or quick].")] = None,
) -> None:
    """Answer one question with many small runs: a table in the terminal, a CSV file and figures in a folder.

    An interrupted run goes on where it stopped. Networks of the transformers library take part in stability where it is
    installed.

    \b
    Examples:
      hesscale study stability --quick
      hesscale study pruning --data DIR
    """
    row = STUDIES[name.value]
    folder = out or Path("runs") / name.value / ("quick" if quick else "full")
    command = f"hesscale study {name.value}" + (" --quick" if quick else "")
    config = {"command": command, "title": name.value, **row.settings(quick)}
    with clear_errors(folder), alone(folder), one_thread():
        run = open_run(folder, config)
        name_left_out(read(run, row.kind.checks).left_out)
        _measure(run, row, data)
        show_study(run, row.kind)
        table = folder / f"{name.value}.csv"
        durable.replace(table, row.csv(read(run, row.kind.checks).records).encode())
        typer.echo(f"wrote {table}")


def _measure(run: Run, row: Study, data: Path | None) -> None:
    """Fills in what the run lacks, cell by cell."""
    config = run.config
    known = {tuple(record[key] for key in row.keys) for record in read(run, row.kind.checks).records}
    cells = [*row.cells(config)]
    missing = [cell for cell in cells if cell not in known]
    with progress_bar() as progress:
        task = progress.add_task("cells", total=len(cells), completed=len(cells) - len(missing))
        for cell in missing:
            progress.update(task, description=", ".join(map(str, cell)))
            run.add(*row.measure(cell, config, data=data, folder=run.folder))
            progress.advance(task)


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
