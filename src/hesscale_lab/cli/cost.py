"""``hesscale cost``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .. import runs
from ..locks import alone
from ..plots import cost as plot
from ..runs import Run, amend, open_run
from ..studies import cost as study
from ..studies import step_memory
from ..studies.optimizer_steps import HARDEST, UNIT, Method, installed, left_out
from ..studies.rounds import Watch
from ..tasks import cost_networks
from ..tasks.cost_networks import Cell
from .console import clear_errors, not_below, progress_bar, show, stop


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
) -> None:
    """Measure time and memory of a step of every optimizer relative to Adam's: the paper's figure 2, and beyond it.

    Rounds that other processes disturb are repeated; leave the machine alone nevertheless. A full run takes an hour or
    two. An interrupted run goes on where it stopped: cells that were measured are never measured again.

    \b
    Examples:
      hesscale cost --quick
      hesscale cost --only headline
      hesscale cost --only headline --optimizer "AdaHesScale fused"
      hesscale cost --threads 2 --out DIR
    """
    methods = _methods(optimizer or ())
    name = "-".join(["quick" if quick else "full", *(re.sub(r"\W+", "-", one) for one in optimizer or ())])
    folder = out or Path("runs") / "cost" / name
    missing = None if optimizer else left_out()
    with clear_errors(folder), alone(folder), runs.threads(threads):
        count = rounds or _ROUNDS["quick" if quick else "full"]
        run = open_run(folder, _config(methods, optimizer or (), quick, count, threads), free=("command", "asked"))
        _note(run, only, _command(optimizer or (), quick, count, threads))
        if missing:
            typer.echo(f"hesscale: {missing}", err=True)
        _measure(run, methods, _chosen(only, quick))
        for table in (_show_headline, _show_panels, _show_networks, _show_memory, _show_rounds):
            table(run)
        for path in plot.draw(run):
            typer.echo(f"wrote {path}")


def _methods(names: Sequence[str]) -> list[Method]:
    """Those of these names, and what they are compared with; all that are installed if there are no names."""
    methods = installed()
    unknown = [name for name in names if name not in {method.name for method in methods}]
    if unknown:
        choice = ", ".join(repr(method.name) for method in methods)
        stop(f"there is no optimizer {unknown[0]!r}: choose one of {choice}", code=2)
    return [method for method in methods if not names or method.name in (UNIT, HARDEST, *names)]


def _config(methods: Sequence[Method], names: Sequence[str], quick: bool, rounds: int, threads: int) -> dict[str, Any]:
    return {
        "command": _command(names, quick, rounds, threads),
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
    finished = {(record["kind"] == "memory", record["cell"]) for record in run.records}
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


def _show_headline(run: Run) -> None:
    means = study.headline(run.records)
    if not means:
        return
    layers = ", ".join(map(str, cost_networks.HEADLINE))
    batches = ", ".join(map(str, cost_networks.BATCHES))
    table = Table(
        title=f"Cost of a step relative to {UNIT}'s, geometric means of {max(mean.cells for mean in means)} cells\n"
        f"{layers} layers of {cost_networks.WIDTH} tanh units × batch {batches}",
        caption="whole: forward, backward, update, clearing   no forward: backward and update, as in the paper",
    )
    headings = ("optimizer", "whole", "no forward", "whole / fused Adam's", "target for whole")
    rows = [
        (m.optimizer, f"{m.ratio:.2f}", f"{m.ratio_without_forward:.2f}", f"{m.ratio_to_fused:.2f}", m.verdict)
        for m in means
    ]
    show(table, headings, rows)


def _show_panels(run: Run) -> None:
    """Both panels without the forward pass, beside the paper's own ratios; growth with the number of layers."""
    records = run.records
    grown = {(line.optimizer, line.batch): line for line in study.growth(records)}
    names = list(study.by_optimizer(study.of_kind(records, "time", exact=False)))
    for panel, what in (("layers", "more and more layers"), ("outputs", "one layer, more and more outputs")):
        batches = sorted({record["batch"] for record in study.of_kind(records, "time", panel=panel)})
        if not batches:
            continue
        headings = ["optimizer", "paper", *(f"batch {batch}" for batch in batches)]
        rows = []
        for name in names:
            ratios = (study.papers_ratio(panel, name), *(study.ratio_of(records, name, b, panel) for b in batches))
            rows.append([name, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
        show(Table(title=f"Backward and update relative to {UNIT}'s: {what}"), headings, rows)
    batches = sorted({batch for _, batch in grown})
    if batches:
        table = Table(
            title="Growth: α of seconds ∝ parameters^α, whole step, all layers (larger half)",
            caption="target 1.0 ± 0.1; small networks are mostly overhead, which does not grow",
        )
        rows = [[name, *(_growth(grown.get((name, batch))) for batch in batches)] for name in names]
        show(table, ["optimizer", *(f"batch {batch}" for batch in batches)], rows)


def _growth(line: study.Growth | None) -> str:
    if line is None:
        return ""
    return f"{line.exponent:.2f}" + ("" if line.of_larger_half is None else f" ({line.of_larger_half:.2f})")


def _show_networks(run: Run) -> None:
    records = study.of_kind(run.records, "time", panel="networks")
    for cell in dict.fromkeys(record["cell"] for record in records):
        rows = [
            (
                record["optimizer"],
                f"{1000 * record['seconds']:.1f}",
                f"{record['ratio']:.2f}",
                f"{record['ratio_without_forward']:.2f}",
                f"{record['ratio_to_fused']:.2f}",
            )
            for record in records
            if record["cell"] == cell
        ]
        headings = ("optimizer", "ms", "whole", "no forward", "whole / fused Adam's")
        goal = f"target for AdaHesScale: ≤ {study.CONVOLUTIONS_TARGET:g}; the limit of arithmetic is 5/3"
        caption = goal if cell.startswith("3C3D") else None
        show(Table(title=f"Cost of a step relative to {UNIT}'s: {cell}", caption=caption), headings, rows)


def _show_memory(run: Run) -> None:
    records = study.of_kind(run.records, "memory")
    cells = list(dict.fromkeys(record["cell"] for record in records))
    if not cells:
        return
    ratios = {(record["optimizer"], record["cell"]): record for record in records}
    rows = [[name, *(_memory(ratios.get((name, cell))) for cell in cells)] for name in study.by_optimizer(records)]
    table = Table(
        title=f"Peak of memory during a step relative to {UNIT}'s (MiB)",
        caption="all tensors: parameters, state, activations, temporaries",
    )
    show(table, ["optimizer", *cells], rows)


def _memory(record: study.Record | None) -> str:
    return "" if record is None else f"{record['ratio']:.2f} ({record['peak'] / 2**20:.0f})"


def _show_rounds(run: Run) -> None:
    """How calm it was."""
    cells = {record["cell"]: record for record in study.of_kind(run.records, "time", optimizer=UNIT)}.values()
    counts = [sum(record[key] for record in cells) for key in ("rounds", "repeated", "disturbed")]
    typer.echo("{} rounds; {} disturbed ones were repeated, {} were kept for want of calm ones".format(*counts))
