"""``hesscale study``, and what the commands of studies share: tables in the terminal, figures in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .. import durable
from ..locks import alone
from ..plots.drawn import save
from ..report.kinds import STABILITY, Kind
from ..report.stability_tables import as_csv
from ..runs import Run, one_thread, open_run
from ..studies import stability
from ..studies.reading import Record, read
from ..tasks.small_networks import SMALL_NETWORKS, SmallNetwork
from ..tasks.tiny_transformers import tiny_transformers
from .console import clear_errors, name_left_out, progress_bar, show, stop


class Study(StrEnum):
    """What there is to study."""

    STABILITY = "stability"


_QUICK = 8
"""Every so many networks are in the quick version."""


def study(
    name: Annotated[Study, typer.Argument(help="Which study.")],
    quick: Annotated[bool, typer.Option("--quick", help="Every eighth network, in some minutes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/stability/full or quick].")] = None,
) -> None:
    """Count which optimizers survive being dropped in: twenty steps on small networks of all common kinds.

    Networks of the transformers library take part where it is installed. The full study takes about half an hour. An
    interrupted run goes on where it stopped.

    \b
    Examples:
      hesscale study stability --quick
      hesscale study stability --out DIR
    """
    networks = {**SMALL_NETWORKS, **tiny_transformers()}
    chosen = dict([*networks.items()][:: _QUICK if quick else 1])
    folder = out or Path("runs") / name.value / ("quick" if quick else "full")
    config = {
        "command": f"hesscale study {name.value}" + (" --quick" if quick else ""),
        "title": "stability",
        "networks": [*chosen],
        "optimizers": [*stability.METHODS],
        "rates": [*stability.RATES],
        "steps": stability.STEPS,
    }
    with clear_errors(folder), alone(folder), one_thread():
        run = open_run(folder, config)
        name_left_out(read(run, STABILITY.checks).left_out)
        _measure(run, chosen)
        show_study(run, STABILITY)
        table = folder / "stability.csv"
        durable.replace(table, as_csv(read(run, STABILITY.checks).records).encode())
        typer.echo(f"wrote {table}")


def _measure(run: Run, networks: Mapping[str, SmallNetwork]) -> None:
    """Fills in what the run lacks, a network with one batch size and kind of data at a time."""
    known = {(r["network"], r["batch"], r["data"]) for r in read(run, STABILITY.checks).records}
    # all networks once before any of them again: a run that is cut short has seen them all
    cells = [(name, batch, data) for batch, data in stability.CELLS for name in networks]
    missing = [cell for cell in cells if cell not in known]
    with progress_bar() as progress:
        task = progress.add_task("networks", total=len(cells), completed=len(cells) - len(missing))
        for name, batch, data in missing:
            progress.update(task, description=name)
            run.add(*stability.measure(name, networks[name], batch=batch, data=data))
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
