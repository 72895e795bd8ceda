"""The ``hesscale`` command, one file per subcommand: they parse, call, print and write. They hold no numbers."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..extras import what_to_install
from ..interrupts import CODE, end_at_ctrl_c

COMMANDS = ("train", "sweep", "report", "compact", "quality", "cost", "study", "inspect", "coverage")
_STYLE: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,  # keeps the examples in --help on lines of their own
    "pretty_exceptions_enable": False,
}


class _Commands(TyperGroup):
    """The subcommands, each imported when it is called: torch and matplotlib take seconds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # the names, to suggest one

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name."""
        if cmd_name not in COMMANDS:
            return None
        try:
            with end_at_ctrl_c():
                function = getattr(import_module(f".{cmd_name}", __name__), cmd_name)
        except ModuleNotFoundError as error:
            typer.echo(f"hesscale: {what_to_install(error)}", err=True)
            raise typer.Exit(1) from error
        alone = typer.Typer(**_STYLE)
        alone.command(cmd_name)(function)
        return typer.main.get_command(alone)

    def invoke(self, ctx: Any) -> Any:
        """Runs what was asked for; Ctrl-C where the command itself has nothing to say about it is one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("hesscale: stopped", err=True)
            raise typer.Exit(CODE) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the names and summaries into the help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in COMMANDS])


def _summary(name: str) -> str:
    """The first line of a command's description, read in its source rather than imported."""
    source = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    (function,) = (node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return (ast.get_docstring(function) or "").partition("\n")[0]


app = typer.Typer(name="hesscale", cls=_Commands, no_args_is_help=True, **_STYLE)


def _show_version(wanted: bool) -> None:
    if wanted:
        with end_at_ctrl_c():
            import hesscale
        typer.echo(f"hesscale {hesscale.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Hessian diagonals in one backward pass: the paper's experiments.

    \b
    Example:
      hesscale quality --quick
    """
