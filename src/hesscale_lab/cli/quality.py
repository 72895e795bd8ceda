"""``hesscale quality``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..locks import alone
from ..plots import approximation_quality as quality_plot
from ..plots import error_per_time as time_plot
from ..runs import Run, one_thread, open_run
from ..studies import approximation_quality, error_per_time
from ..studies.approximation_quality import STAGES, summarize
from ..tasks.networks import NETWORKS, Size, sources
from .console import clear_errors, not_below, progress_bar, show

NetworkName = StrEnum("NetworkName", {name: name for name in NETWORKS})  # type: ignore[misc]
_ROUNDS = {"full": 30, "quick": 5}


def quality(
    network: Annotated[NetworkName, typer.Option(help="Whose curvature.")] = NetworkName["paper"],
    quick: Annotated[bool, typer.Option("--quick", help="A small version, in under a minute.")] = False,
    seeds: Annotated[
        int | None,
        typer.Option(callback=not_below(1, most=approximation_quality.SEEDS), help="How many of the authors' seeds."),
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
    row, pace = NETWORKS[network.value], "quick" if quick else "full"
    asked = {"seeds": seeds, "examples": examples, "updates": updates}
    size = replace(
        row.quick if quick else row.full, **{key: value for key, value in asked.items() if value is not None}
    )
    folder = out or Path("runs") / "quality" / (f"{network.value}-quick" if quick else network.value)
    with clear_errors(folder), alone(folder), one_thread():
        run = open_run(folder, _config(network.value, size, _ROUNDS[pace]))
        _measure(run, size, data)
        for stage in STAGES:
            _show_quality(run, stage)
        _show_time(run)
        for path in (*quality_plot.draw(run), *time_plot.draw(run)):
            typer.echo(f"wrote {path}")


def _config(network: str, size: Size, rounds: int) -> dict[str, Any]:
    options = f"--seeds {size.seeds} --examples {size.examples} --updates {size.updates}"
    return {
        "command": f"hesscale quality --network {network} {options}"
        + (" --quick" if rounds == _ROUNDS["quick"] else ""),
        "network": network,
        "title": NETWORKS[network].title,
        "seeds": approximation_quality.authors_seeds(size.seeds),
        "examples": size.examples,
        "updates": size.updates,
        "rounds": rounds,
    }


def _measure(run: Run, size: Size, data: Path | None) -> None:
    """Fills in what the run lacks; finished seeds are never computed again."""
    config, network = run.config, NETWORKS[run.config["network"]]
    finished = {record["seed"] for record in run.records if record["kind"] == "quality"}
    missing = [seed for seed in config["seeds"] if seed not in finished]
    untimed = not any(record["kind"] == "time" for record in run.records)
    if not missing and not untimed:
        return
    training, testing = sources(network, data)
    with progress_bar() as progress:
        task = progress.add_task("seeds", total=len(config["seeds"]), completed=len(finished))
        for seed in missing:
            run.add(*approximation_quality.measure(network, seed, size=size, training=training, testing=testing))
            progress.advance(task)
        if untimed:
            progress.update(task, description="times")
            first, rounds = config["seeds"][0], config["rounds"]
            run.add(
                *error_per_time.measure(network, first, size=size, rounds=rounds, training=training, testing=testing)
            )


def _show_quality(run: Run, stage: str) -> None:
    lines = summarize(run.records, stage)
    if not lines:
        return
    config = run.config
    when = "" if not config["updates"] else ", before training" if stage == STAGES[0] else ", after training"
    table = Table(
        title=f"L1 distance from the exact Hessian diagonal\n{config['title']}{when}: "
        f"{len(config['seeds'])} seeds × {config['examples']} examples",
        caption=f"relative: to {approximation_quality.REFERENCE}'s error   {approximation_quality.ZERO}: estimate 0\n"
        "as coded: |Hv| of one probe, over 50 for MC50, as in the authors' experiment",
    )
    show(
        table,
        ("method", "mean L1 error", "relative", "lowest … highest seed"),
        [
            (
                line.method,
                f"{line.error:.4g}",
                f"{line.relative:.2f}",
                f"{min(line.relative_by_seed):.2f} … {max(line.relative_by_seed):.2f}",
            )
            for line in lines
        ],
    )


def _show_time(run: Run) -> None:
    """What sampling reaches: with one sample, and with as many as fit in the time HesScale takes."""
    records = [record for record in run.records if record["kind"] == "time"]
    for stage, batch in dict.fromkeys((record["stage"], record["batch"]) for record in records):
        cell = [record for record in records if (record["stage"], record["batch"]) == (stage, batch)]
        unit = next(record for record in cell if record["method"] == approximation_quality.REFERENCE)
        headings = ("method", "samples", "ms", "relative time", "relative error")
        title = f"Error per unit of time: {run.config['title']}, {stage}, batch {batch}"
        show(Table(title=title), headings, [_time_row(record, unit) for record in cell])


def _time_row(record: Mapping[str, Any], unit: Mapping[str, Any]) -> tuple[str, ...]:
    seconds, error = record["seconds"], f"{record['error'] / unit['error']:.2f}"
    if seconds is None:
        return record["method"], "exact" if record["method"] == "GGN" else "", "", "", error
    return (
        record["method"],
        str(record["samples"] or ""),
        f"{1000 * seconds:.2f}",
        f"{seconds / unit['seconds']:.2f}",
        error,
    )
