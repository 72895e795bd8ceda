"""Trainings against measured seconds: how soon each reaches Adam's final validation loss, and its loss over time.

A run is compared with Adam's of the same seed, which has the same split, first weights and batches. Both measures are
ratios to Adam's, so that below 1 is better; means and standard errors are over seeds:

    time    t / t_Adam, t the first time at which the validation loss is Adam's last or lower, linear between epochs
    area    ∫₀ᵀ loss dt / ∫₀ᵀ loss_Adam dt, T the time that both have trained

There is no time where Adam ended no lower than it began, and no ratio of areas where a loss is not above 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..histories import History, State
from ..wording import Estimate, Table, estimate, plain
from .collect import Experiment, Series

BASELINES = ("AdamFused", "Adam")
"""Whom others are compared with: the first of these that there is."""

_HEADINGS = ("optimizer", "seeds", "s to {name}'s final valid. loss", "relative", "", "area over time, relative", "")
_NOTE = (
    "Measured seconds of training, evaluations not counted; every run beside {name}'s of the same seed, as ratios: "
    "below 1 is better. Mean ± standard error over seeds; wins and loses: by more than two of them; k of n arrived: "
    "only so many seeds came down to {name}'s final loss; loses without a number: none did, though all had the time; "
    "open: none did, and a run ended before the time that {name} took, or {name} itself ended no lower than it began. "
    "Area: under the validation loss, over the time that both have trained; open where a loss is not above 0."
)


@dataclass(frozen=True)
class Comparison:
    """An optimizer beside the baseline, over the seeds that both have."""

    series: Series
    seeds: int
    aimless: int  # of these, in how many the baseline ended no lower than it began: then there is nothing to reach
    reached: int  # how many came down to the baseline's final loss
    open: int  # how many ended higher, but before the time that the baseline took
    seconds: Estimate | None  # until then, of those that did
    time: Estimate | None  # the same relative to the baseline's; None unless all did
    area: Estimate | None  # None where a loss is not above 0: a ratio would say nothing

    @property
    def time_verdict(self) -> str:
        """In a few words; if no seed arrives, the optimizer loses, provided that all had the time."""
        if self.time is not None:
            return verdict(self.time, self.seeds)
        if self.reached:
            return f"{self.reached} of {self.seeds} arrived"
        return "open" if self.open or self.aimless else "behind, 1 seed" if self.seeds == 1 else "loses"

    @property
    def area_verdict(self) -> str:
        """In a few words."""
        return "open" if self.area is None else verdict(self.area, self.seeds)


def verdict(ratio: Estimate, seeds: int) -> str:
    """Wins or loses by more than two standard errors; of one seed, only that it is ahead or behind."""
    if seeds == 1:
        return "ahead, 1 seed" if ratio.mean < 1 else "behind, 1 seed"
    if abs(ratio.mean - 1) <= 2 * ratio.error:
        return "no difference"
    return "wins" if ratio.mean < 1 else "loses"


def baseline_of(experiment: Experiment) -> str | None:
    """The optimizer that the others are compared with; None if there is none whose runs came to an end."""
    for name in BASELINES:
        series = experiment.chosen.get(name)
        if series and series.epochs and all(history.state is State.FINISHED for history in series.histories):
            return name
    return None


def comparisons(experiment: Experiment) -> Iterator[Comparison]:
    """Every optimizer at its chosen setting beside the baseline; those that share no seed with it are left out."""
    name = baseline_of(experiment)
    if name is None:
        return
    theirs = dict(zip(experiment.chosen[name].seeds, experiment.chosen[name].histories, strict=True))
    for label, series in experiment.chosen.items():
        histories = zip(series.seeds, series.histories, strict=True)
        pairs = [(history, theirs[seed]) for seed, history in histories if seed in theirs]
        if label != name and pairs and series.epochs:
            yield _compare(series, pairs)


def _compare(series: Series, pairs: list[tuple[History, History]]) -> Comparison:
    aiming = [(ours, adam) for ours, adam in pairs if _losses(adam)[-1] < _losses(adam)[0]]
    aimless = len(pairs) - len(aiming)
    times = [tuple(reach(one, _losses(pair[1])[-1]) for one in pair) for pair in aiming]
    arrived = [] if aimless else [(ours, adam) for ours, adam in times if ours is not None and adam]
    late = [_end(*pair) < (adam or 0.0) for pair, (ours, adam) in zip(aiming, times, strict=True) if ours is None]
    positive = all(loss > 0 for pair in pairs for history in pair for loss in _losses(history))
    return Comparison(
        series,
        len(pairs),
        aimless,
        len(arrived),
        sum(late),
        seconds=estimate([ours for ours, _ in arrived]) if arrived else None,
        time=estimate([ours / adam for ours, adam in arrived]) if len(arrived) == len(pairs) else None,
        area=estimate([_area_ratio(ours, adam) for ours, adam in pairs]) if positive else None,
    )


def _area_ratio(ours: History, adam: History) -> float:
    end = _end(ours, adam)
    return area(ours, end) / area(adam, end)


def _end(ours: History, adam: History) -> float:
    """The time that both have trained; a run that broke off counts as if it went on."""
    return _seconds(adam)[-1] if ours.state is State.NOT_FINITE else min(_seconds(ours)[-1], _seconds(adam)[-1])


def reach(history: History, target: float) -> float | None:
    """The first time at which the validation loss is this or lower; None if it never was."""
    points = list(zip(_seconds(history), _losses(history), strict=True))
    if points[0][1] <= target:
        return points[0][0]
    for (before, high), (after, low) in pairwise(points):
        if low <= target:
            return after if high == low else before + (after - before) * (high - target) / (high - low)
    return None


def area(history: History, end: float) -> float:
    """∫₀ᵉⁿᵈ of the validation loss; after a run broke off, with its loss before training, as everywhere."""
    points = list(zip(_seconds(history), _losses(history), strict=True))
    total = 0.0
    for (before, first), (after, second) in pairwise(points):
        stop = min(after, end)
        if stop > before:
            last = first + (second - first) * (stop - before) / (after - before)
            total += (first + last) / 2 * (stop - before)
    return total + points[0][1] * max(0.0, end - points[-1][0])


def _seconds(history: History) -> list[float]:
    return [value for value in history.seconds if not math.isnan(value)]


def _losses(history: History) -> tuple[float, ...]:
    return history.values["valid_loss"][: len(_seconds(history))]


def per_second_table(experiment: Experiment) -> Table | None:
    """Wins and losses per second; None where there is nobody to compare."""
    name, others = baseline_of(experiment), list(comparisons(experiment))
    if name is None or not others:
        return None
    headings = tuple(heading.format(name=name) for heading in _HEADINGS)
    return Table(f"Per second, against {name}", headings, tuple(map(_row, others)), _NOTE.format(name=name))


def _row(one: Comparison) -> tuple[str, ...]:
    missed = 0 if one.aimless else one.seeds - one.reached
    never = f"not reached by {missed} of {one.seeds}" if missed else ""
    return (
        one.series.label,
        str(one.seeds),
        never if one.seconds is None else plain(one.seconds, digits=1),
        never if one.time is None else plain(one.time, digits=3),
        one.time_verdict,
        "" if one.area is None else plain(one.area, digits=3),
        one.area_verdict,
    )
