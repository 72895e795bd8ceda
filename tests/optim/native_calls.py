"""Fixtures of tests that need the update in C++."""

from collections.abc import Iterator
from typing import Any

import pytest

from hesscale.fast import enabled, native


@pytest.fixture(autouse=True)
def turned_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also where the whole suite runs without."""
    if enabled():
        yield
        return
    monkeypatch.delenv("HESSCALE_PLAIN")
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parameters in each call."""
    found: list[int] = []
    original = native.update

    def update(rows: Any) -> None:
        found.append(len(rows))
        original(rows)

    monkeypatch.setattr(native, "update", update)
    return found
