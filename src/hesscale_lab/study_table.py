"""The studies of ``hesscale study`` as a table: a new one is a file in ``studies`` and a row here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .plots import step_sizes
from .plots.continual import figures as continual_figures
from .plots.pruning import figures as pruning_figures
from .report.continual_tables import as_csv as continual_csv
from .report.continual_tables import continual_tables
from .report.kind import Kind, no_figures
from .report.laplace_tables import laplace_csv, laplace_tables
from .report.pruning_tables import as_csv as pruning_csv
from .report.pruning_tables import pruning_tables
from .report.reinforcement_tables import reinforcement_csv, reinforcement_tables
from .report.stability_tables import as_csv as stability_csv
from .report.stability_tables import stability_tables
from .studies import continual, laplace, pruning, reinforcement, stability
from .studies.reading import Record

Cell = tuple[Any, ...]
"""What is measured at once, and never again: after an interrupt a run goes on with the next."""


class Measure(Protocol):
    """The records of a cell, each of which names the cell in its fields ``Study.keys``."""

    def __call__(
        self, cell: Cell, config: Mapping[str, Any], *, data: Path | None, folder: Path
    ) -> Iterable[Mapping[str, Any]]:
        """Measures; ``data`` is what --data says, ``folder`` the run's, where a study may keep what it trains."""


@dataclass(frozen=True)
class Study:
    """One row of the table."""

    summary: str  # for --help: what it finds out, and how long that takes
    settings: Callable[[bool], Mapping[str, Any]]  # from --quick to what config.json says: cells follow from it
    cells: Callable[[Mapping[str, Any]], Iterable[Cell]]  # of these settings, in the order in which they are measured
    keys: tuple[str, ...]  # the fields of a record that say which cell it belongs to
    measure: Measure
    csv: Callable[[Sequence[Record]], str]  # the one table, written into the run's folder
    kind: Kind


STUDIES: Mapping[str, Study] = {
    "stability": Study(
        "which optimizers survive being dropped in: twenty steps on small networks of all common kinds (half an hour)",
        stability.settings,
        stability.cells,
        ("network", "batch", "data"),
        stability.measure_cell,
        stability_csv,
        Kind(
            "study stability",
            (("networks", list), ("rates", list)),
            {"stability": stability.is_record},
            no_figures,
            stability_tables,
        ),
    ),
    "pruning": Study(
        "which saliency prunes MLPs on MNIST and a CNN on CIFAR-10 best (25 minutes)",
        pruning.settings,
        pruning.cells,
        ("network", "seed"),
        pruning.measure_cell,
        pruning_csv,
        Kind(
            "study pruning",
            (("subjects", list), ("saliencies", list), ("sparsities", dict)),
            {"pruning": pruning.is_record},
            pruning_figures,
            pruning_tables,
        ),
    ),
    "continual": Study(
        "what forgets least over five tasks of permuted and split MNIST (25 minutes)",
        continual.settings,
        continual.cells,
        ("benchmark", "method"),
        continual.measure_cell,
        continual_csv,
        Kind(
            "study continual",
            (("benchmarks", list), ("methods", list), ("strengths", dict)),
            {"continual": continual.is_record},
            continual_figures,
            continual_tables,
        ),
    ),
    "reinforcement": Study(
        "how returns of A2C and PPO depend on the step size, with and without a trust region (an hour)",
        reinforcement.settings,
        reinforcement.cells,
        ("environment", "algorithm", "optimizer", "first"),
        reinforcement.measure_cell,
        reinforcement_csv,
        Kind(
            "study reinforcement",
            (("environments", list), ("algorithms", list), ("steps", int)),
            {"reinforcement": reinforcement.is_record},
            step_sizes.figures,
            reinforcement_tables,
        ),
    ),
    "laplace": Study(
        "how well diagonals of several kinds tell a network on MNIST what it does not know (a quarter of an hour)",
        laplace.settings,
        laplace.cells,
        ("seed",),
        laplace.measure_cell,
        laplace_csv,
        Kind(
            "study laplace",
            (("diagonals", list), ("seeds", list), ("tested", int)),
            {"laplace": laplace.is_record},
            no_figures,
            laplace_tables,
        ),
    ),
}
