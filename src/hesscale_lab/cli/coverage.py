"""``hesscale coverage``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..coverage import as_markdown
from ..coverage import measure as measure_coverage
from .console import clear_errors, stop


def coverage(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/coverage.md"),
) -> None:
    """List the operations of the installed torch that have a rule, and those that have none, as a page.

    \b
    Example:
      hesscale coverage --out docs/coverage.md
    """
    try:
        page = as_markdown(measure_coverage())
    except ModuleNotFoundError as error:
        stop(f"torch's op database needs {error.name}: pip install {error.name}", code=1)
    with clear_errors(out):
        out.write_text(page)
    typer.echo(f"wrote {out}")
