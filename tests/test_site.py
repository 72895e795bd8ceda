"""The site: every page is in the menu, and what a package index shows of the README leads somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MENU = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(encoding="utf-8"), re.M | re.S)
MADE = {"gallery/index"}
"""What the build writes."""


def test_every_page_is_in_the_menu_once() -> None:
    listed = [line for block in MENU for line in block.splitlines() if line and not line.startswith(":")]
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert sorted(listed) == sorted(pages | MADE), "docs/index.md lists the pages of docs/"


def test_the_oldest_torch_is_the_one_that_is_promised() -> None:
    """What `make test-oldest` installs is the lower end of the range in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = (line for line in project["dependencies"] if line.startswith("torch"))
    oldest = re.search(r"^OLDEST := (\d+\.\d+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert oldest and torch.startswith(f"torch>={oldest[1]},")
    assert f"torch {oldest[1]} or newer" in (DOCS / "start.md").read_text(encoding="utf-8")
