"""A kind of study as a report knows it: how to tell it, what its records must have, what is drawn and tabulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..plots.drawn import Config, Drawn, Records
from ..studies.reading import Checks
from .table import Table


@dataclass(frozen=True)
class Kind:
    """One row of ``kinds.KINDS``, or what a row of ``study_table.STUDIES`` adds to them."""

    name: str  # of its command
    settings: Sequence[tuple[str, type]]  # of its config.json, by which it is known, and which readers need
    checks: Checks
    figures: Callable[[Config, Records], Iterator[Drawn]]
    tables: Callable[[Config, Records], Iterator[Table]]

    def made(self, config: Config) -> bool:
        """Whether a run of this kind has these settings."""
        return all(isinstance(config.get(name), kind) for name, kind in self.settings)


def no_figures(config: Config, records: Records) -> Iterator[Drawn]:
    """None: for a kind that has tables only."""
    return iter(())
