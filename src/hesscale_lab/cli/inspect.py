"""``hesscale inspect``."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table as RichTable

from hesscale import MissingRuleError, applications
from hesscale.applications import Inspection
from hesscale.columns.dial import Rank

from .. import files
from ..figures import as_png
from ..report.inspection import figures
from ..report.page import Picture, Section, page
from ..wording import Table
from .console import clear_errors, not_below, show, stop

_NOTE = (
    "h: the diagonal of the Hessian of the mean loss, as the method sees it. 8 bits, 4 bits: the change of the loss to "
    "expect from rounding the weights to so many, Δ²/24 · trace with a step of Δ = (max − min) / (2^bits − 1)."
)


def inspect(
    what: Annotated[
        str, typer.Argument(help="FILE.py:FUNCTION or MODULE:FUNCTION; it returns model, loss_fn, batches.")
    ],
    method: Annotated[str, typer.Option(help="Any name that hesscale.estimate knows.")] = "hesscale",
    rank: Annotated[str, typer.Option(help="Columns carried beside the diagonal: a number, or full.")] = "0",
    samples: Annotated[int, typer.Option(callback=not_below(1), help="For methods that sample.")] = 1,
    batches: Annotated[int | None, typer.Option(callback=not_below(1), help="How many to use [default: all].")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("inspection.html"),
) -> None:
    """Look at the curvature of your own network, layer by layer: a table, and one HTML page with figures.

    FUNCTION() returns the model, a loss of its outputs and the targets, and batches of (inputs, targets), as in
    hesscale.applications.inspect. Its file is run as Python runs it.

    \b
    Example:
      hesscale inspect train.py:make --rank 3
    """
    torch.manual_seed(seed)
    model, loss_fn, every = _parts(_function(what)(), what)
    options: dict[str, Any] = {"method": method, "rank": _rank(rank), "samples": samples}
    options["generator"] = torch.Generator().manual_seed(seed)
    chosen = every if batches is None else itertools.islice(every, batches)
    try:
        result = applications.inspect(model, loss_fn, chosen, progress=sys.stderr.isatty(), **options)
    except (ValueError, TypeError, MissingRuleError) as error:
        stop(" ".join(str(error).split()), code=1)
    title = f"Curvature of {type(model).__name__}, by {method}" + (f" with rank={rank}" if options["rank"] else "")
    table = Table(title, result.rows[0], result.rows[1:], _NOTE)
    show(RichTable(title=table.title, caption=table.note), table.headings, table.rows)
    with clear_errors(out.parent):
        files.replace(out, _page(what, table, result).encode())
    typer.echo(f"wrote {out}")


def _function(what: str) -> Callable[[], Any]:
    source, colon, name = what.rpartition(":")
    if not colon or not name.isidentifier() or not source:
        stop(f"what to look at is given as FILE.py:FUNCTION or MODULE:FUNCTION, not {what!r}", code=2)
    module = _from_file(Path(source)) if source.endswith(".py") else _from_name(source)
    function = getattr(module, name, None)
    if not callable(function):
        stop(f"{source} has no function {name}", code=2)
    return function


def _from_file(path: Path) -> Any:
    if not path.is_file():
        stop(f"there is no file {path}", code=2)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        stop(f"{path} is not Python", code=2)
    sys.path.insert(0, str(path.resolve().parent))  # as for a script: it may import its neighbors
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its classes can be pickled, and dataclasses look it up
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        stop(f"there is no module {name}", code=2)


def _parts(made: Any, what: str) -> tuple[torch.nn.Module, Any, Iterable[Any]]:
    if not isinstance(made, tuple) or len(made) != 3:
        stop(f"{what}() must return model, loss_fn, batches, not a {type(made).__name__}", code=2)
    model, loss_fn, batches = made
    if not isinstance(model, torch.nn.Module) or not callable(loss_fn) or not isinstance(batches, Iterable):
        kinds = ", ".join(type(part).__name__ for part in made)
        stop(f"{what}() must return a module, a function and something to loop over, not {kinds}", code=2)
    return model, loss_fn, batches


def _rank(text: str) -> Rank:
    if text == "full":
        return "full"
    if not text.isdigit():
        stop(f"--rank must be a number from 0, or full, not {text}", code=2)
    return int(text)


def _page(what: str, table: Table, result: Inspection) -> str:
    order = ", ".join(layer.name for layer in result.most_sensitive[:5])
    plots = figures(result.diagonal)
    pictures = [Picture(p.caption, f"{p.name}: {p.caption}", as_png(p.figure), None) for p in plots]
    sections = (
        Section("Layers", "layers", (f"Most sensitive to rounding: {order}.", table)),
        Section("Sizes of curvature", "sizes", tuple(pictures) or ("All entries are zero.",)),
    )
    return page(f"hesscale inspect {what}", f"{table.title}.", sections)
