"""The kinds of studies a report knows: how to tell them, what their records must have, what is drawn and tabulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..plots import approximation_quality as quality_plot
from ..plots import cost as cost_plot
from ..plots import error_per_time as time_plot
from ..plots.drawn import Config, Drawn, Records
from ..studies import approximation_quality, cost, error_per_time, stability
from ..studies.reading import Checks
from .stability_tables import stability_tables
from .study_tables import cost_tables, quality_tables, time_tables
from .table import Table


@dataclass(frozen=True)
class Kind:
    """One row of the table below."""

    name: str  # of its command
    settings: Sequence[tuple[str, type]]  # of its config.json, by which it is known, and which readers need
    checks: Checks
    figures: Callable[[Config, Records], Iterator[Drawn]]
    tables: Callable[[Config, Records], Iterator[Table]]

    def made(self, config: Config) -> bool:
        """Whether a run of this kind has these settings."""
        return all(isinstance(config.get(name), kind) for name, kind in self.settings)


def _quality_figures(config: Config, records: Records) -> Iterator[Drawn]:
    return chain(quality_plot.figures(config, records), time_plot.figures(config, records))


def _quality_tables(config: Config, records: Records) -> Iterator[Table]:
    return chain(quality_tables(config, records), time_tables(config, records))


QUALITY = Kind(
    "quality",
    (("network", str), ("title", str), ("seeds", list), ("examples", int), ("updates", int)),
    {"quality": approximation_quality.is_record, "time": error_per_time.is_record},
    _quality_figures,
    _quality_tables,
)
COST = Kind("cost", (("optimizers", list), ("threads", int)), cost.CHECKS, cost_plot.figures, cost_tables)
STABILITY = Kind(
    "study stability",
    (("networks", list), ("rates", list)),
    {"stability": stability.is_record},
    lambda config, records: iter(()),
    stability_tables,
)

KINDS = (QUALITY, COST, STABILITY)


def kind_of(config: dict[str, Any]) -> Kind | None:
    """The kind of the study with these settings, if it is known."""
    return next((kind for kind in KINDS if kind.made(config)), None)
