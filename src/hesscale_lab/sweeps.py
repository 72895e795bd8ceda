"""The paper's search: a grid of settings, the smallest area under the validation loss, and its repeats."""

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
from .runs import Run
from .settings import Settings, settings_of
from .workers import Progress, Status

SEED = 0
"""The seed of the search. The repeats begin with it, so the chosen run is not computed again."""


@dataclass(frozen=True)
class Grid:
    """Values to try."""

    lrs: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    beta1s: tuple[float, ...] = (0.0, 0.9)
    beta2s: tuple[float, ...] = (0.99, 0.999, 0.9999)


PAPER = Grid()

TASK_GRIDS: Mapping[str, Grid] = dict.fromkeys(
    ("cifar100-3c3d", "cifar100-allcnnc"), Grid((*PAPER.lrs, 1.0), (0.9,), (0.999,))
)
"""The tasks with another grid than PAPER: on CIFAR-100 the authors searched for the step size alone."""

OPTIMIZER_LRS: Mapping[str, tuple[float, ...]] = {"AdaBL89": (1e-8, 1e-7, 1e-6, 1e-5, 1e-4)}
"""The optimizers with other step sizes: the authors chose 1e-6, which is not in the grid of their code."""


def grid(
    task: str,
    optimizer: str,
    *,
    epochs: int,
    lrs: Sequence[float] | None = None,
    beta1s: Sequence[float] | None = None,
    beta2s: Sequence[float] | None = None,
    fields: Sequence[tuple[str, Any]] = (),
    options: Sequence[Options] = ((),),
    seed: int = SEED,
    **same: Any,
) -> list[Settings]:
    """All settings to try, with the tables' values where none are given, and the options that the optimizer takes.

    ``same``: further fields of Settings, the same in all.
    """
    spec, usual = optimizer_named(optimizer), TASK_GRIDS.get(task, PAPER)
    lrs = lrs or OPTIMIZER_LRS.get(optimizer, usual.lrs)
    betas = [*product(beta1s or usual.beta1s, beta2s or usual.beta2s)] if spec.betas else [(0.0, 0.0)]
    fitting = [tuple((name, value) for name, value in one if name in spec.takes) for one in options]
    same |= {"seed": seed, "epochs": epochs, "fields": tuple(sorted(fields))}
    settings = [
        Settings(task, optimizer, float(lr), float(beta1), float(beta2), **same, options=given)
        for given, lr, (beta1, beta2) in product(fitting, lrs, betas)
    ]
    return list(dict.fromkeys(settings))


def area(run: Run) -> float:
    """Σ over epochs 0 … E of the mean validation loss; ValueError if the run has not ended.

    After a run became not finite its loss of epoch 0 is used, as in the authors' harness; ∞ if that is not finite.
    """
    history = read_history(run)
    if history is None and is_finished(run):
        return math.inf
    if history is None or history.state is State.UNFINISHED:
        raise ValueError(f"{run.folder} has not ended")
    return history.area


def choose(runs: Iterable[Run]) -> Settings:
    """The setting with the smallest area, averaged over its seeds; the first one among equals."""
    areas: dict[Settings, list[float]] = {}
    for run in runs:
        areas.setdefault(replace(settings_of(run.config), seed=SEED), []).append(area(run))
    if not areas:
        raise ValueError("no run to choose from")
    return min(areas, key=lambda settings: sum(areas[settings]) / len(areas[settings]))


def repeats(settings: Settings, count: int) -> list[Settings]:
    """The same settings with ``count`` seeds, the first of them the search's."""
    return [replace(settings, seed=SEED + number) for number in range(count)]


@dataclass(frozen=True)
class Sweep:
    """The runs of the search, the choice for each optimizer (with its options) that has a result, and its repeats."""

    searched: list[Progress]
    chosen: dict[str, Settings]
    repeated: list[Progress]

    @property
    def failed(self) -> list[Progress]:
        """The runs without a result, each once."""
        return list({p.folder: p for p in (*self.searched, *self.repeated) if p.status is Status.FAILED}.values())


def sweep(settings: Sequence[Settings], *, seeds: int, run: Callable[[Sequence[Settings]], list[Progress]]) -> Sweep:
    """The whole search: runs all settings, chooses for each optimizer, runs the repeats of the choice.

    An optimizer with other options is another optimizer. Failed runs are not chosen from.
    """
    searched = run(settings)
    chosen = {}
    for name in dict.fromkeys(one.label for one in settings):
        ended = [find_run(p.folder) for p in searched if p.settings.label == name and p.has_ended]
        if ended:
            chosen[name] = choose(ended)
    return Sweep(searched, chosen, run([one for best in chosen.values() for one in repeats(best, seeds)]))
