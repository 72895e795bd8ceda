"""The command as tests call it."""

from __future__ import annotations

from typer.testing import CliRunner

from hesscale_lab.cli import app


def lab(*arguments: object, columns: int = 200) -> tuple[int, str, str]:
    """The exit code of the command, and what it wrote to stdout and stderr."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
