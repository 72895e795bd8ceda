"""The ``hesscale`` command: parses, calls a study, prints and writes what comes back. It holds no numbers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

import hesscale

from .plots.approximation_quality import draw
from .runs import open_run, write_record
from .studies import approximation_quality
from .studies.approximation_quality import Quality, Summary

app = typer.Typer(
    name="hesscale",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # keeps the examples in --help on lines of their own
    pretty_exceptions_enable=False,
)


def _stop(message: str, *, code: int) -> NoReturn:
    typer.echo(f"hesscale: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _stop(f"cannot write to {folder}: {error.strerror or error}", code=1)


def _at_least_one(option: typer.CallbackParam, value: int) -> int:
    if value < 1:
        _stop(f"--{option.name} must be at least 1, not {value}", code=2)
    return value


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hesscale {hesscale.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Hessian diagonals in one extra backward pass: the paper's experiments.

    \b
    Example:
      hesscale quality --seeds 5 --examples 20
    """


@app.command()
def quality(
    seeds: Annotated[int, typer.Option(callback=_at_least_one, help="How many networks: seeds 0, 1, 2, …")] = 5,
    examples: Annotated[int, typer.Option(callback=_at_least_one, help="Random examples per network.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder for quality.png and quality.json.")] = Path("runs/quality"),
) -> None:
    """Compare estimates with the exact diagonal of the Hessian on the paper's small tanh network.

    \b
    Example:
      hesscale quality --seeds 5 --examples 20 --out runs/quality
    """
    command = ["hesscale", "quality", "--seeds", str(seeds), "--examples", str(examples), "--out", str(out)]
    with _clear_errors(out):
        folder = open_run(out)
        result = _measure(range(seeds), examples)
        rows = approximation_quality.summarize(result)
        Console().print(_table(rows, result))
        results = {**asdict(result), "summary": [asdict(row) for row in rows]}
        for path in (
            draw(result, rows, folder / "quality.png"),
            write_record(folder / "quality.json", command=shlex.join(command), results=results),
        ):
            typer.echo(f"wrote {path}")


def _measure(seeds: Sequence[int], examples: int) -> Quality:
    with Console(stderr=True).status("") as status:

        def show(done: int) -> None:
            status.update(f"{done} of {len(seeds)} networks measured")

        show(0)
        return approximation_quality.measure(seeds, examples=examples, progress=show)


def _table(rows: Sequence[Summary], result: Quality) -> Table:
    network = "-".join(map(str, result.widths))
    table = Table(
        title=f"L1 distance from the exact Hessian diagonal\n{network} tanh network, "
        f"{len(result.seeds)} seeds × {result.examples} examples",
        caption=f"relative: to {approximation_quality.REFERENCE}'s error   {approximation_quality.ZERO}: estimate zero",
    )
    table.add_column("method")
    for heading in ("mean L1 error", "relative", "lowest … highest seed"):
        table.add_column(heading, justify="right")
    for row in rows:
        spread = f"{min(row.relative_by_seed):.1f} … {max(row.relative_by_seed):.1f}"
        table.add_row(row.method, f"{row.error:.4f}", f"{row.relative:.1f}", spread)
    return table
