"""Every Python block of the documents runs as it stands, in order, in one namespace per document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hesscale.rules import RULES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RULES, "_rows", dict(RULES._rows))  # rules that a document registers stay there
    namespace: dict[str, object] = {"__name__": document.stem}
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", document.read_text(), re.S | re.M)):
        exec(compile(block, f"{document.name}, block {number}", "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}, which is not there"
