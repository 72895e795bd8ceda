"""Timing in interleaved rounds: each times every piece once, so that a slow moment of the machine hits all of them.

Rounds that other processes disturbed are thrown away and repeated. Two signs give them away: this process waited (its
own processor time is less than the time on the wall), or a fixed piece of work, timed before and after the round, took
longer than it usually does, as it does when a neighbor takes caches, memory bandwidth or clock rate.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import final

import torch

Times = tuple[float, ...]
Piece = Callable[[], Times]
"""Does some work and says how long it took, in one or several ways of counting."""

WAITED = 0.03
"""The share of a round in which this process may have waited."""
SLOWED = 0.10
"""By how much the fixed piece of work may exceed its running median."""

_MEMORY = 50  # rounds over which that median runs


@dataclass(frozen=True)
class Clocks:
    """Seconds on the wall, seconds of processor time of this process, and the fixed piece of work."""

    wall: Callable[[], float] = time.perf_counter
    busy: Callable[[], float] = time.process_time
    work: Callable[[], object] | None = None


@final
class Watch:
    """Tells calm rounds from disturbed ones. One watch serves a whole run: it learns what is usual."""

    def __init__(self, clocks: Clocks | None = None) -> None:
        self._clocks = Clocks() if clocks is None else clocks
        self._work = _fixed_work() if self._clocks.work is None else self._clocks.work
        self._usual: deque[float] = deque(maxlen=_MEMORY)
        for _ in range(5):
            self._usual.append(self._calibrated())

    def disturbance(self, run: Callable[[], object]) -> float:
        """Runs, and says how disturbed that was: at most 1 if it was calm."""
        before, (wall, busy) = self._calibrated(), self._now()
        run()
        end = self._now()
        usual, slowest = median(self._usual), max(before, self._calibrated())
        self._usual.append(slowest)
        waited = 1 - (end[1] - busy) / (end[0] - wall)
        return max(waited / WAITED, (slowest / usual - 1) / SLOWED)

    def _now(self) -> tuple[float, float]:
        return self._clocks.wall(), self._clocks.busy()

    def _calibrated(self) -> float:
        start = self._clocks.wall()
        self._work()
        return self._clocks.wall() - start


def _fixed_work() -> Callable[[], object]:
    """Some milliseconds of arithmetic and of memory traffic."""
    matrix, vector = torch.full((320, 320), 0.5), torch.ones(4_000_000)

    def work() -> None:
        for _ in range(2):
            torch.mm(matrix, matrix)
            vector.mul_(1.0)

    work()
    return work


@dataclass(frozen=True)
class Rounds:
    """What was measured: the times of each piece, round by round."""

    times: tuple[Mapping[str, Times], ...]
    repeated: int  # rounds that were thrown away
    disturbed: int  # rounds that were kept although disturbed, because there were too many of them


def interleaved(pieces: Mapping[str, Piece], *, rounds: int, watch: Watch) -> Rounds:
    """The times of ``rounds`` calm rounds, each of which runs every piece, beginning with another one than the last.

    As many disturbed ones are repeated as rounds are wanted; after that the least disturbed are kept.
    """
    calm: list[Mapping[str, Times]] = []
    noisy: list[tuple[float, Mapping[str, Times]]] = []
    with _settled():
        while len(calm) < rounds and len(calm) + len(noisy) < 2 * rounds:
            found: dict[str, Times] = {}
            turn = (len(calm) + len(noisy)) % len(pieces)
            disturbance = watch.disturbance(functools.partial(_run, pieces, turn, found))
            if disturbance <= 1:
                calm.append(found)
            else:
                noisy.append((disturbance, found))
    noisy.sort(key=lambda entry: entry[0])
    kept = [found for _, found in noisy[: rounds - len(calm)]]
    return Rounds((*calm, *kept), repeated=len(noisy) - len(kept), disturbed=len(kept))


def _run(pieces: Mapping[str, Piece], turn: int, found: dict[str, Times]) -> None:
    names = list(pieces)
    for name in names[turn:] + names[:turn]:
        found[name] = pieces[name]()


@contextmanager
def _settled() -> Iterator[None]:
    """Python collects garbage in here as it does for users, but never looks at what was there before.

    Otherwise each piece would now and then pay for walking over the objects of all others.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
