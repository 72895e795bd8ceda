"""The ``hesscale`` command: each subcommand parses, calls, prints and writes."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..startup import STOPPED, end_at_ctrl_c, what_to_install

COMMANDS = {
    "train": "train",
    "sweep": "sweep",
    "report": "report",
    "compact": "report",
    "quality": "study",
    "cost": "study",
    "study": "study",
    "inspect": "inspect",
    "coverage": "coverage",
}
"""The file of each command, which has a function of the command's name."""
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
                function = getattr(import_module(f".{COMMANDS[cmd_name]}", __name__), cmd_name)
        except ModuleNotFoundError as error:
            typer.echo(f"hesscale: {what_to_install(error)}", err=True)
            raise typer.Exit(1) from error
        alone = typer.Typer(**_STYLE)
        alone.command(cmd_name)(function)
        return typer.main.get_command(alone)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; if it does not handle Ctrl-C itself, Ctrl-C prints one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("hesscale: stopped", err=True)
            raise typer.Exit(STOPPED) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the names and summaries into the help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in COMMANDS])


def _summary(name: str) -> str:
    """The first line of a command's description, read from its source rather than imported."""
    source = ast.parse(Path(__file__).with_name(f"{COMMANDS[name]}.py").read_text(encoding="utf-8"))
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
