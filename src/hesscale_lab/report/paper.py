"""The paper's own learning curves, to be drawn beside ours: data/paper_curves.csv.gz, which names its source on top."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..histories import METRICS
from ..wording import Estimate


@dataclass(frozen=True)
class PaperCurve:
    """An optimizer at the setting the authors chose: means over seeds and their standard errors, one per epoch."""

    task: str
    optimizer: str
    lr: float
    beta1: float
    beta2: float
    seeds: int
    values: Mapping[str, tuple[Estimate, ...]]

    @property
    def epochs(self) -> int:
        """The last epoch."""
        return len(self.values["test_loss"]) - 1


def paper_curves(task: str) -> dict[str, PaperCurve]:
    """The authors' curves of this task, by optimizer; none for a task that is not in the paper."""
    return dict(_all_curves().get(task, {}))


@cache
def _all_curves() -> dict[str, dict[str, PaperCurve]]:
    rows: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in csv.DictReader(_lines()):
        rows.setdefault((row["task"], row["optimizer"]), []).append(row)
    curves: dict[str, dict[str, PaperCurve]] = {}
    for (task, optimizer), epochs in rows.items():
        curves.setdefault(task, {})[optimizer] = _curve(task, optimizer, epochs)
    return curves


def _lines() -> Iterator[str]:
    text = gzip.decompress((files("hesscale_lab") / "data" / "paper_curves.csv.gz").read_bytes()).decode()
    return (line for line in text.splitlines() if not line.startswith("#"))


def _curve(task: str, optimizer: str, epochs: list[dict[str, str]]) -> PaperCurve:
    lr, beta1, beta2 = (float(epochs[0][name]) for name in ("lr", "beta1", "beta2"))
    values = {name: tuple(Estimate(float(row[name]), float(row[f"{name}_se"])) for row in epochs) for name in METRICS}
    return PaperCurve(task, optimizer, lr, beta1, beta2, int(epochs[0]["seeds"]), values)
