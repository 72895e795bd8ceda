"""The kinds of studies a report knows, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from ..plots import approximation_quality as quality_plot
from ..plots import cost as cost_plot
from ..plots import error_per_time as time_plot
from ..plots.drawn import Config, Drawn, Records
from ..studies import approximation_quality, cost, error_per_time
from ..study_table import STUDIES
from .kind import Kind as Kind
from .study_tables import cost_tables, quality_tables, time_tables
from .table import Table


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

KINDS = (QUALITY, COST, *(study.kind for study in STUDIES.values()))


def kind_of(config: dict[str, Any]) -> Kind | None:
    """The kind of the study with these settings, if it is known."""
    return next((kind for kind in KINDS if kind.made(config)), None)
