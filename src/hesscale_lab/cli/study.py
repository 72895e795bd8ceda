"""``hesscale study``, ``hesscale quality`` and ``hesscale cost``: studies that go on cell by cell."""

from __future__ import annotations

import re
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .. import files
from ..figures import save
from ..files import alone
from ..processes import threads as with_threads
from ..runs import CONFIG, Run, amend, open_run
from ..studies import cost as cost_study
from ..studies import cost_steps
from ..studies import quality as quality_study
from ..studies.study import Config, Records, Study, read
from ..studies.table import STUDIES, WITH_OPTIONS
from ..tasks.networks import NETWORKS
from ..wording import csv_text
from .console import clear_errors, name_left_out, not_below, progress_bar, show, stop

_NAMES = [name for name in STUDIES if name not in WITH_OPTIONS]
StudyName = StrEnum("StudyName", _NAMES)  # type: ignore[misc]
NetworkName = StrEnum("NetworkName", {name: name for name in NETWORKS})  # type: ignore[misc]
Part = StrEnum("Part", [part for part in cost_study.PARTS if part != "all"])  # type: ignore[misc]
_SUMMARIES = "; ".join(f"{name}: {STUDIES[name].summary}" for name in _NAMES)


def study(
    name: Annotated[StudyName, typer.Argument(help=f"{_SUMMARIES}.")],
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
    row, folder = STUDIES[name.value], out or Path("runs") / name.value / ("quick" if quick else "full")
    command = f"hesscale study {name.value}" + (" --quick" if quick else "")
    records = _run(name.value, {"command": command, "title": name.value, **row.settings(quick)}, folder, data=data)
    with clear_errors(folder):
        table = folder / f"{name.value}.csv"
        files.replace(table, csv_text(row.rows(records)).encode())
        typer.echo(f"wrote {table}")


def quality(
    network: Annotated[NetworkName, typer.Option(help="Whose curvature.")] = NetworkName["paper"],
    quick: Annotated[bool, typer.Option("--quick", help="A small version, in under a minute.")] = False,
    seeds: Annotated[
        int | None,
        typer.Option(callback=not_below(1, most=quality_study.SEEDS), help="How many of the authors' seeds."),
    ] = None,
    examples: Annotated[int | None, typer.Option(callback=not_below(1), help="Examples per network.")] = None,
    updates: Annotated[
        int | None, typer.Option(callback=not_below(0), help="Of training, before a second measurement.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with MNIST/raw, as torchvision makes it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/quality/NETWORK].")] = None,
) -> None:
    """Compare estimates with the exact diagonal of the Hessian, and with the time they take: the paper's figure 1.

    Networks other than the paper's go beyond it. An interrupted run goes on where it stopped.

    \b
    Examples:
      hesscale quality --quick
      hesscale quality --network mnist-tanh --data DIR
    """
    folder = out or Path("runs") / "quality" / (f"{network.value}-quick" if quick else network.value)
    sizes = {"seeds": seeds, "examples": examples, "updates": updates}
    _run("quality", quality_study.config_of(network.value, quick=quick, **sizes), folder, data=data)


def cost(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer networks and rounds, in some minutes.")] = False,
    rounds: Annotated[int | None, typer.Option(callback=not_below(1), help="Of which medians are taken.")] = None,
    threads: Annotated[int, typer.Option(callback=not_below(1), help="With which torch computes.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/cost/full or quick].")] = None,
    only: Annotated[Part | None, typer.Option(help="One part; the rest may follow in the same folder.")] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="Only this one, beside Adam and fused Adam; may be given several times.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Compiled passes beside eager ones, instead.")] = False,
) -> None:
    """Measure time and memory of a step of every optimizer relative to Adam's: the paper's figure 2, and beyond it.

    Rounds that other processes disturb are repeated; leave the machine alone nevertheless. A full run takes an hour or
    two. An interrupted run goes on where it stopped: cells that were measured are never measured again.

    \b
    Examples:
      hesscale cost --quick
      hesscale cost --only headline
      hesscale cost --only headline --optimizer "AdaHesScale every=10"
      hesscale cost --threads 2 --out DIR
      hesscale cost --compiled --rounds 9
    """
    if compiled and (optimizer or only):
        stop("--compiled has optimizers and networks of its own: leave out --optimizer and --only", code=2)
    names, known = optimizer or [], [method.name for method in cost_steps.installed()]
    if unknown := [name for name in names if name not in known]:
        stop(f"there is no optimizer {unknown[0]!r}: choose one of {', '.join(map(repr, known))}", code=2)
    words = [*(re.sub(r"\W+", "-", name) for name in names), *(["compiled"] if compiled else [])]
    folder = out or Path("runs") / "cost" / "-".join(["quick" if quick else "full", *words])
    with clear_errors(folder):
        before = Run(folder).config.get("asked", []) if (folder / CONFIG).exists() else []
    asked = [*dict.fromkeys([*before, only.value if only else "all"])]
    config = cost_study.config_of(names, quick=quick, compiled=compiled, rounds=rounds, threads=threads, asked=asked)
    missing = None if optimizer or compiled else cost_steps.left_out()
    records = _run("cost", config, folder, threads=threads, free=("command", "asked"), warning=missing)
    typer.echo(cost_study.calmness(records))


def _run(
    kind: str,
    config: Config,
    folder: Path,
    *,
    data: Path | None = None,
    threads: int = 1,
    free: tuple[str, ...] = (),
    warning: str | None = None,
) -> Records:
    """Measures the cells that the run in this folder lacks, prints the tables, and draws the figures."""
    row = STUDIES[kind]
    with clear_errors(folder), ExitStack() as stack:
        stack.enter_context(alone(folder))
        stack.enter_context(with_threads(threads))  # small networks gain nothing from more than one
        run = open_run(folder, {"kind": kind, **config}, free=free)
        if free:
            amend(run, **{name: config[name] for name in free})
        if warning:
            typer.echo(f"hesscale: {warning}", err=True)
        name_left_out(read(run, row.checks).left_out)
        _measure(run, row, data)
        records = read(run, row.checks).records
        _show(run, row, records)
        draw(run, row, records)
    return records


def _measure(run: Run, row: Study, data: Path | None) -> None:
    config, cells = run.config, row.cells(run.config)
    known = {tuple(record.get(key) for key in row.keys) for record in read(run, row.checks).records}
    missing = [cell for cell in cells if cell not in known]
    with progress_bar() as progress:
        task = progress.add_task("cells", total=len(cells), completed=len(cells) - len(missing))
        for cell in missing:
            progress.update(task, description=", ".join(str(part) for part in cell if part is not None))
            run.add(*row.measure(cell, config, data=data, folder=run.folder))
            progress.advance(task)


def _show(run: Run, row: Study, records: Records) -> None:
    try:
        tables = tuple(row.tables(run.config, records))
    except ValueError as error:
        stop(f"the records in {run.folder} do not go together ({error}): choose another --out", code=1)
    for table in tables:
        show(Table(title=table.title, caption=table.note or None), table.headings, table.rows)


def draw(run: Run, row: Study, records: Records) -> None:
    """Writes the figures of a study into its folder."""
    for plot in row.figures(run.config, records):
        for path in save(plot.figure, run.folder / plot.name):
            typer.echo(f"wrote {path}")
