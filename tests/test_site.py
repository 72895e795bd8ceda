"""The site: every page is in the menu, what points to one leads there, and all places say the same of the project."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

from hesscale.errors import SITE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MENU = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(encoding="utf-8"), re.M | re.S)
MADE = {"gallery/index"}
"""What the build writes."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LIBRARY = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src" / "hesscale").rglob("*.py")}


def test_every_page_is_in_the_menu_once() -> None:
    listed = [line for block in MENU for line in block.splitlines() if line and not line.startswith(":")]
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert sorted(listed) == sorted(pages | MADE), "docs/index.md lists the pages of docs/"


def test_the_oldest_torch_is_the_one_that_is_promised() -> None:
    """What `make test-oldest` installs is the lower end of the range in pyproject.toml."""
    (torch,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    oldest = re.search(r"^OLDEST := (\d+\.\d+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert oldest and torch.startswith(f"torch>={oldest[1]},")
    assert f"torch {oldest[1]} or newer" in (DOCS / "start.md").read_text(encoding="utf-8")


def test_the_library_points_to_pages_of_the_site() -> None:
    """Not to files of the repository, which users of a wheel do not have."""
    assert f"{SITE}/" == PROJECT["urls"]["Documentation"]
    linked = {name for text in LIBRARY.values() for name in re.findall(rf"(?:{SITE}|{{SITE}})/([\w-]+\.html)", text)}
    assert "adding-a-rule.html" in linked
    assert not [name for name in linked if not (DOCS / name).with_suffix(".md").exists()]


def test_no_text_of_the_library_names_a_file_of_docs() -> None:
    where = [path.name for path, text in LIBRARY.items() if re.search(r"\bdocs/[\w-]+\.md", text)]
    assert where == []


def test_pages_of_the_gallery_lead_to_their_scripts() -> None:
    """Their own sources are made by the build, and are in no repository."""
    script_of = runpy.run_path(str(DOCS / "conf.py"))["script_of"]
    made = ["gallery/index", *(f"gallery/{path.stem}" for path in (ROOT / "examples" / "gallery").glob("*.py"))]
    assert len(made) > 1 and all((ROOT / script_of(page)).is_file() for page in made)
    assert script_of("start") is None


def test_signatures_have_names_of_types() -> None:
    with_names = runpy.run_path(str(DOCS / "conf.py"))["with_names"]
    assert with_names("(inputs: TypeAliasForwardRef('Tensors') | None = None)") == "(inputs: Tensors | None = None)"
    assert with_names(None) is None


def test_the_project_is_described_and_installed_alike_everywhere() -> None:
    said = PROJECT["description"]
    assert f'abstract: "{said}."' in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    readme, start = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", DOCS / "start.md"))
    install = re.compile(r"^## Install\n\n(```bash\n.*?```\n\nOnce .*?\[lab\]'`\.)", re.M | re.S)
    assert install.findall(readme) == install.findall(start) != []
