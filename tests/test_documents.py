"""Every Python block of the documents runs as it stands, in order, in one namespace per document."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hesscale.rules import RULES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path) -> list[str]:
    """Its pieces of Python, in order."""
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.S | re.M)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RULES, "_rows", dict(RULES._rows))  # rules that a document registers stay there
    namespace: dict[str, object] = {"__name__": document.stem}
    for number, block in enumerate(blocks(document)):
        exec(compile(block, f"{document.name}, block {number}", "exec", dont_inherit=True), namespace)


def test_the_first_page_shows_what_its_blocks_print(capsys: pytest.CaptureFixture[str]) -> None:
    """In comments that begin a line."""
    namespace: dict[str, object] = {}
    for block in blocks(ROOT / "docs" / "start.md"):
        exec(compile(block, "start.md", "exec", dont_inherit=True), namespace)
        assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)$", block, re.M)


def leads_somewhere(document: Path, target: str) -> bool:
    """Whether a link within the repository, or to a page that the site's build makes, is right."""
    if ":" in target:
        return True  # elsewhere
    if target.startswith("gallery/"):  # made by the build from scripts
        script = re.sub(r"^images/sphx_glr_|_\d+\.png$|\.md$", "", target.removeprefix("gallery/"))
        return script == "index" or (ROOT / "examples" / "gallery" / f"{script}.py").exists()
    return (document.parent / target).exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
        assert leads_somewhere(document, target), f"{document.name} links to {target}, which is not there"


def test_the_readme_can_be_read_elsewhere() -> None:
    """A package index shows it without the repository around it: links are made to lead to the site."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for row in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(row["pattern"], row["replacement"], text)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets and all(target.startswith("https://") for target in targets)
    assert "/start.html)" in text and "/main/results/report/quality-paper-quality.png)" in text
