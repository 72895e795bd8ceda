"""The ``hesscale`` command, one file per subcommand: they parse, call, print and write. They hold no numbers."""

from __future__ import annotations

from typing import Annotated

import typer

import hesscale

from .cost import cost
from .coverage import coverage
from .quality import quality
from .report import report
from .sweep import sweep
from .train import train

app = typer.Typer(
    name="hesscale",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # keeps the examples in --help on lines of their own
    pretty_exceptions_enable=False,
)


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
      hesscale quality --quick
    """


for command in (train, sweep, report, quality, cost, coverage):
    app.command()(command)
