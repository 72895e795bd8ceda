"""``hesscale coverage``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..coverage import as_markdown
from ..coverage import measure as measure_coverage
from ..extras import what_to_install
from .console import clear_errors, stop


def coverage(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/coverage.md"),
) -> None:
    """List the operations of the installed torch that have a rule, and those that have none, as a page.

    \b
    Example:
      hesscale coverage --out docs/coverage.md
    """
    if not out.parent.is_dir():
        stop(f"there is no folder {out.parent} here: say where the page goes with --out FILE", code=2)
    try:
        page = as_markdown(measure_coverage())
    except ModuleNotFoundError as error:
        stop(f"for torch's op database, {what_to_install(error)}", code=1)
    with clear_errors(out):
        out.write_text(page, encoding="utf-8")
    typer.echo(f"wrote {out}")
