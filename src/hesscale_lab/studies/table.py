"""The studies as a table: a new one is a file in this folder and a row here."""

from __future__ import annotations

from collections.abc import Mapping

from . import continual, cost, laplace, pruning, quality, reinforcement, stability
from .study import Study

STUDIES: Mapping[str, Study] = {
    "quality": quality.STUDY,
    "cost": cost.STUDY,
    "stability": stability.STUDY,
    "pruning": pruning.STUDY,
    "continual": continual.STUDY,
    "reinforcement": reinforcement.STUDY,
    "laplace": laplace.STUDY,
}
"""By the value of "kind" in a run's config.json. The first two have options, and so commands of their own."""
WITH_OPTIONS = ("quality", "cost")
