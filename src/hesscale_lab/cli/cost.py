"""``hesscale cost``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import runs
from ..locks import alone
from ..report.kinds import COST
from ..runs import Run, amend, open_run
from ..studies import cost as study
from ..studies import step_memory
from ..studies.cost import of_kind
from ..studies.optimizer_steps import COMPILED, HARDEST, UNIT, Method, installed, left_out
from ..studies.reading import read
from ..studies.rounds import Watch
from ..tasks import cost_networks
from ..tasks.cost_networks import Cell
from ..wording import counted
from .console import clear_errors, name_left_out, not_below, progress_bar, stop
from .study import show_study


class Part(StrEnum):
    """What to measure of it all."""

    HEADLINE = "headline"
    PANELS = "panels"
    NETWORKS = "networks"
    MEMORY = "memory"


_ROUNDS = {"full": 15, "quick": 5}


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
    methods = [*COMPILED] if compiled else _methods(optimizer or ())
    words = [*(re.sub(r"\W+", "-", one) for one in optimizer or ()), *(["compiled"] if compiled else [])]
    name = "-".join(["quick" if quick else "full", *words])
    folder = out or Path("runs") / "cost" / name
    missing = None if optimizer or compiled else left_out()
    with clear_errors(folder), alone(folder), runs.threads(threads):
        count = rounds or _ROUNDS["quick" if quick else "full"]
        again = _command(optimizer or (), quick, count, threads) + (" --compiled" if compiled else "")
        run = open_run(folder, _config(again, methods, quick, count, threads), free=("command", "asked"))
        _note(run, only, again)
        if missing:
            typer.echo(f"hesscale: {missing}", err=True)
        name_left_out(read(run, COST.checks).left_out)
        cells = [cell for cell in cost_networks.COMPILED if cell.quick or not quick]
        _measure(run, methods, cells if compiled else _chosen(only, quick))
        show_study(run, COST)
        _show_rounds(run)


def _methods(names: Sequence[str]) -> list[Method]:
    """Those of these names, and what they are compared with; all that are installed if there are no names."""
    methods = installed()
    unknown = [name for name in names if name not in {method.name for method in methods}]
    if unknown:
        choice = ", ".join(repr(method.name) for method in methods)
        stop(f"there is no optimizer {unknown[0]!r}: choose one of {choice}", code=2)
    return [method for method in methods if not names or method.name in (UNIT, HARDEST, *names)]


def _config(command: str, methods: Sequence[Method], quick: bool, rounds: int, threads: int) -> dict[str, Any]:
    return {
        "command": command,
        "asked": [],
        "optimizers": [method.name for method in methods],
        "quick": quick,
        "rounds": rounds,
        "threads": threads,
    }


def _command(names: Sequence[str], quick: bool, rounds: int, threads: int) -> str:
    options = (" --quick" if quick else "") + "".join(f' --optimizer "{name}"' for name in names)
    return f"hesscale cost --rounds {rounds} --threads {threads}{options}"


def _note(run: Run, only: Part | None, command: str) -> None:
    """Writes down which parts were asked for so far, and the commands that repeat them."""
    asked = [*dict.fromkeys([*run.config.get("asked", ["all"]), only.value if only else "all"])]
    wanted = ["all"] if "all" in asked else asked
    commands = [command if part == "all" else f"{command} --only {part}" for part in wanted]
    amend(run, asked=asked, command=" && ".join(commands))


def _chosen(only: Part | None, quick: bool) -> list[Cell]:
    """The cells asked for, those of the headline first."""
    cells = [cell for cell in (*cost_networks.CELLS, *cost_networks.WEIGHED) if cell.quick or not quick]
    parts = {
        None: lambda cell: True,
        Part.HEADLINE: lambda cell: cell.headline,
        Part.PANELS: lambda cell: cell.panel in ("layers", "outputs"),
        Part.NETWORKS: lambda cell: cell.panel == "networks",
        Part.MEMORY: lambda cell: cell.panel == "memory",
    }
    return sorted(filter(parts[only], cells), key=lambda cell: not cell.headline)


def _measure(run: Run, methods: Sequence[Method], cells: Sequence[Cell]) -> None:
    """Fills in what the run lacks."""
    finished = {(record["kind"] == "memory", record["cell"]) for record in read(run, COST.checks).records}
    missing = [cell for cell in cells if (cell.panel == "memory", cell.name) not in finished]
    if not missing:
        return
    watch = Watch()
    with progress_bar() as progress:
        task = progress.add_task("cells", total=len(cells), completed=len(cells) - len(missing))
        for cell in missing:
            progress.update(task, description=cell.name)
            if cell.panel == "memory":
                run.add(*step_memory.measure(cell, methods))
            else:
                run.add(*study.measure(cell, methods, rounds=run.config["rounds"], watch=watch))
            progress.advance(task)


def _show_rounds(run: Run) -> None:
    """How calm it was."""
    cells = {
        record["cell"]: record for record in of_kind(read(run, COST.checks).records, "time", optimizer=UNIT)
    }.values()
    counts = [sum(record[key] for record in cells) for key in ("rounds", "repeated", "disturbed")]
    rounds, (repeated, disturbed) = counted(counts[0], "round"), counts[1:]
    typer.echo(f"{rounds}; {repeated} disturbed ones were repeated, {disturbed} were kept for want of calm ones")
