"""``hesscale quality``."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..locks import alone
from ..report.kinds import QUALITY
from ..runs import Run, one_thread, open_run
from ..studies import approximation_quality, error_per_time
from ..studies.approximation_quality import STAGES
from ..studies.reading import read
from ..tasks.networks import NETWORKS, Size, sources
from .console import clear_errors, name_left_out, not_below, progress_bar
from .study import show_study

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
        name_left_out(read(run, QUALITY.checks).left_out)
        _measure(run, size, data)
        show_study(run, QUALITY)


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
    records = read(run, QUALITY.checks).records
    stages = STAGES if size.updates else STAGES[:1]
    known = {(record["seed"], record["stage"]) for record in records if record["kind"] == "quality"}
    missing = [seed for seed in config["seeds"] if any((seed, stage) not in known for stage in stages)]
    untimed = not any(record["kind"] == "time" for record in records)
    if not missing and not untimed:
        return
    training, testing = sources(network, data)
    with progress_bar() as progress:
        task = progress.add_task("seeds", total=len(config["seeds"]), completed=len(config["seeds"]) - len(missing))
        for seed in missing:
            run.add(*approximation_quality.measure(network, seed, size=size, training=training, testing=testing))
            progress.advance(task)
        if untimed:
            progress.update(task, description="times")
            first, rounds = config["seeds"][0], config["rounds"]
            run.add(
                *error_per_time.measure(network, first, size=size, rounds=rounds, training=training, testing=testing)
            )
