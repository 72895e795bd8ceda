"""What tests of the lab share because it takes seconds: Ray, and drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hesscale_lab.report import write as writing
from hesscale_lab.workers import cluster


@pytest.fixture(scope="session")
def two_workers() -> Iterator[None]:
    """Ray, started once for all tests of this process."""
    with cluster(workers=2) as slots:
        assert slots == 2
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report makes its figures, but does not render them."""

    def save(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
        for path in paths:
            path.write_bytes(b"not rendered")
        return paths

    monkeypatch.setattr(writing, "save", save)
    monkeypatch.setattr(writing, "as_png", lambda figure: b"not rendered")
