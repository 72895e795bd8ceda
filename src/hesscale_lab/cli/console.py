"""What the commands share: options, errors in one line, progress bars and tables."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..files import InUseError
from ..plugins import PluginFailure
from ..runs import DamagedRunError, OtherRunError
from ..settings import LARGEST, is_step_size
from ..startup import STOPPED, what_to_install
from ..tasks.archives import DataError

Every = Annotated[str | None, typer.Option(help="Refresh curvature in every k-th step only [default: 1].")]
Eps = Annotated[str | None, typer.Option(help="Added below the fraction of a step [default: 1e-8].")]
Bound = Annotated[str | None, typer.Option(help="No entry moves by more than lr times it [default: none].")]
TrustRegion = Annotated[str | None, typer.Option(help="Bounds the quadratic model's change [default: none].")]
Rank = Annotated[str | None, typer.Option(help="Columns carried beside the diagonal, or full [default: 0].")]
PluginFile = Annotated[
    Path | None, typer.Option(help="A Python file with tasks or optimizers of your own, as TASKS and OPTIMIZERS.")
]


def stop(message: str, *, code: int) -> NoReturn:
    """Ends the command with one line on stderr."""
    typer.echo(f"hesscale: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def clear_errors(folder: Path) -> Iterator[None]:
    """Ends the command with one line if anything goes wrong with a run in this folder."""
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
        stop(f"stopped; the same command goes on from what is in {folder}", code=STOPPED)


def not_below(least: int, *, most: int | None = None) -> Any:
    """The callback of an option with a smallest value, and perhaps a largest."""

    def check(option: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value < least:
            stop(f"--{option.name} must be at least {least}, not {value}", code=2)
        if value is not None and most is not None and value > most:
            stop(f"--{option.name} must be at most {most}, not {value}", code=2)
        return value

    return check


def check_numbers(name: str, numbers: Iterable[float], text: object) -> None:
    """ValueError that names the option if a step size or a β is out of range; ``text`` is what was given."""
    if name.startswith("lr"):
        if not all(map(is_step_size, numbers)):
            raise ValueError(f"--{name} must be above 0 and below {LARGEST:g}, not {text}")
    elif not all(0 <= number < 1 for number in numbers):
        raise ValueError(f"--{name} must be at least 0 and below 1, not {text}")


def progress_bar() -> Progress:
    """A bar on stderr that leaves nothing behind."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def show(table: Table, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first column is words and whose others are numbers, wider than the console if need be."""
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False)
    width = console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum
    console.width = max(console.width, width)  # rich would cut numbers off
    console.print(table)


def name_left_out(lines: Iterable[str]) -> None:
    """Names on stderr what could not be read."""
    for line in lines:
        typer.echo(f"hesscale: left out {line}", err=True)
