"""The paper's search: a grid of settings, the one with the smallest area under the validation loss, its repeats.

How runs are computed is the subject of ``workers``; here is what to run and what to choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .compact import find_run
from .histories import State, is_finished, read_history
from .optimizers import optimizer_named
from .options import Options
from .plugins import Plugin
from .runs import Run
from .settings import Settings
from .workers import Progress, Standing, settings_of
from .workers import run_all as run_all  # where a user of this file looks for it

SEED = 0
"""The seed of the search. The repeats begin with it, so that the chosen run is not computed again."""


@dataclass(frozen=True)
class Grid:
    """Values to try."""

    lrs: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    beta1s: tuple[float, ...] = (0.0, 0.9)
    beta2s: tuple[float, ...] = (0.99, 0.999, 0.9999)


PAPER = Grid()

TASK_GRIDS: Mapping[str, Grid] = {
    # on CIFAR-100 the authors searched for the step size alone
    "cifar100-3c3d": Grid((1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0), (0.9,), (0.999,)),
    "cifar100-allcnnc": Grid((1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0), (0.9,), (0.999,)),
}
"""What differs from PAPER, by task."""

OPTIMIZER_LRS: Mapping[str, tuple[float, ...]] = {
    # the authors chose 1e-6, which is not in the grid of their code: "range selected for each method"
    "AdaBL89": (1e-8, 1e-7, 1e-6, 1e-5, 1e-4),
}
"""Step sizes that differ from the task's, by optimizer."""


def grid(
    task: str,
    optimizer: str,
    *,
    epochs: int,
    lrs: Sequence[float] | None = None,
    beta1s: Sequence[float] | None = None,
    beta2s: Sequence[float] | None = None,
    subset: int | None = None,
    fields: Sequence[tuple[str, Any]] = (),
    options: Sequence[Options] = ((),),
    plugin: Plugin | None = None,
    text: str | None = None,
    seed: int = SEED,
) -> list[Settings]:
    """All settings to try; what is not given comes from the tables above. Of ``options``, those the optimizer takes."""
    made = optimizer_named(optimizer)
    row = TASK_GRIDS.get(task, PAPER)
    lrs = lrs or OPTIMIZER_LRS.get(optimizer, row.lrs)
    betas = product(beta1s or row.beta1s, beta2s or row.beta2s)
    pairs = list(betas) if made.betas else [(0.0, 0.0)]  # one run per step size
    same: dict[str, Any] = {
        "seed": seed,
        "epochs": epochs,
        "subset": subset,
        "fields": tuple(sorted(fields)),
        "plugin": plugin,
        "text": text,
    }
    fitting = [tuple((name, value) for name, value in one if name in made.takes) for one in options]
    settings = [
        Settings(task, optimizer, float(lr), float(beta1), float(beta2), **same, options=given)
        for given, lr, (beta1, beta2) in product(fitting, lrs, pairs)
    ]
    return list(dict.fromkeys(settings))


def area(run: Run) -> float:
    """Σ over epochs 0 … E of the mean validation loss; ValueError if the run has not ended.

    After a run became not finite its loss of epoch 0 is used, as in the authors' harness; ∞ if not even that is finite.
    """
    history = read_history(run)
    if history is None and is_finished(run):
        return math.inf
    if history is None or history.state is State.UNFINISHED:
        raise ValueError(f"{run.folder} has not ended")
    return history.area


def choose(runs: Iterable[Run]) -> Settings:
    """The setting with the smallest area, averaged over its seeds where there are several; the first among equals."""
    areas: dict[Settings, list[float]] = {}
    for run in runs:
        areas.setdefault(replace(settings_of(run.config), seed=SEED), []).append(area(run))
    if not areas:
        raise ValueError("no run to choose from")
    return min(areas, key=lambda settings: sum(areas[settings]) / len(areas[settings]))


def repeats(settings: Settings, count: int) -> list[Settings]:
    """The same with ``count`` seeds, the search's among them."""
    return [replace(settings, seed=SEED + place) for place in range(count)]


@dataclass(frozen=True)
class Sweep:
    """What was searched, what was chosen for each optimizer (with its options) that has a result, and its repeats."""

    searched: list[Progress]
    chosen: dict[str, Settings]
    repeated: list[Progress]

    @property
    def failed(self) -> list[Progress]:
        """Runs without a result; each once."""
        return list({p.folder: p for p in (*self.searched, *self.repeated) if p.standing is Standing.FAILED}.values())


def sweep(settings: Sequence[Settings], *, seeds: int, run: Callable[[Sequence[Settings]], list[Progress]]) -> Sweep:
    """The whole search: ``run`` all settings, choose for each optimizer, ``run`` the repeats of what was chosen.

    An optimizer with other options is another one. A run that failed is not chosen from.
    """
    searched = run(settings)
    chosen = {}
    for name in dict.fromkeys(one.label for one in settings):
        ended = [find_run(p.folder) for p in searched if p.settings.label == name and p.has_ended]
        if ended:
            chosen[name] = choose(ended)
    return Sweep(searched, chosen, run([one for best in chosen.values() for one in repeats(best, seeds)]))
