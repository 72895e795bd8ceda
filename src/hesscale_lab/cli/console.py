"""What all commands share: how they refuse, show progress and print tables."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..extras import what_to_install
from ..interrupts import CODE
from ..locks import InUseError
from ..plugins import PluginFailure
from ..runs import DamagedRunError, OtherRunError
from ..tasks.archives import DataError


def stop(message: str, *, code: int) -> NoReturn:
    """Ends the command with one line on stderr."""
    typer.echo(f"hesscale: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def clear_errors(folder: Path) -> Iterator[None]:
    """Whatever can go wrong with a run in this folder ends as one line; nothing that was measured is lost."""
    try:
        yield
    except PluginFailure as error:
        typer.echo(f"hesscale: {error}:", err=True)
        traceback.print_exception(error.__cause__)
        raise typer.Exit(1) from error
    except OtherRunError as error:
        stop(str(error), code=2)
    except (DataError, DamagedRunError, InUseError, FileNotFoundError) as error:
        stop(str(error), code=1)
    except ModuleNotFoundError as error:
        stop(what_to_install(error), code=1)
    except BrokenPipeError:
        stop(f"nobody reads the output any more; what was measured is in {folder}", code=1)
    except OSError as error:
        stop(f"cannot write to {folder}: {error.strerror or error}", code=1)
    except KeyboardInterrupt:
        stop(f"stopped; the same command goes on from what is in {folder}", code=CODE)


def not_below(least: int, *, most: int | None = None) -> Any:
    """The callback of an option that has a least value, and perhaps a largest."""

    def check(option: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value < least:
            stop(f"--{option.name} must be at least {least}, not {value}", code=2)
        if value is not None and most is not None and value > most:
            stop(f"--{option.name} must be at most {most}, not {value}", code=2)
        return value

    return check


def progress_bar() -> Progress:
    """A bar on stderr that leaves nothing behind."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


def show(table: Table, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first column is words and whose others are numbers, wider than the console if need be."""
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if not place else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False)
    whole = console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum
    console.width = max(console.width, whole)  # in too little room rich would cut numbers off
    console.print(table)


def name_left_out(lines: Iterable[str]) -> None:
    """Says on stderr what could not be read."""
    for line in lines:
        typer.echo(f"hesscale: left out {line}", err=True)
