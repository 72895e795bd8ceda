"""Time and memory of a step: interleaved rounds that are watched for disturbances, and the peak of all tensors.

A step is forward, backward with curvature, update and clearing of gradients; backward and update alone are counted as
well, as in the paper. Each round times every optimizer once, on a network of its own, so that a slow moment of the
machine hits all of them; a ratio is the median over rounds of the ratio to Adam in the same round. A disturbed round is
repeated. Two signs give it away: this process waited (its processor time is less than the time on the wall), or a fixed
piece of work, timed before and after the round, took longer than usual (a neighbor takes caches or memory bandwidth).

Memory is the bytes of all tensors alive at once, as torch's allocator reports them: parameters, inputs, optimizer
state, and what a step needs on its way. Work space of libraries such as oneDNN is not counted.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from statistics import median, quantiles
from typing import Any, final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hesscale.fast.workspace import release

from ..tasks.cost_networks import Workload
from .cost_steps import HARDEST, UNIT, Method, Step, known_warnings
from .study import Record

WAYS = ("", "_without_forward")
"""The endings of the fields for the two ways to count."""

_PIECE, _MOST = 0.04, 50  # seconds of Adam's steps in a piece, and the most steps
_WARM_UP = 3
_EXACT_ROUNDS = 3  # exact diagonals take seconds and need no precision

_LAST = "last step"

Times = tuple[float, ...]
Piece = Callable[[], Times]
"""Works and returns the seconds that it took, in one or several ways of counting."""

WAITED = 0.03
"""The largest share of a calm round in which this process waits."""
SLOWED = 0.10
"""How much longer than its running median the fixed work may take in a calm round."""

_MEMORY = 50  # rounds of the running median


@dataclass(frozen=True)
class Clocks:
    """Seconds on the wall, seconds of processor time of this process, and the fixed piece of work."""

    wall: Callable[[], float] = time.perf_counter
    busy: Callable[[], float] = time.process_time
    work: Callable[[], object] | None = None


@final
class DisturbanceMeter:
    """Tells calm rounds from disturbed ones. It learns what is usual, so one meter serves a whole run."""

    def __init__(self, clocks: Clocks | None = None) -> None:
        self._clocks = Clocks() if clocks is None else clocks
        self._work = _fixed_work() if self._clocks.work is None else self._clocks.work
        self._usual: deque[float] = deque(maxlen=_MEMORY)
        for _ in range(5):
            self._usual.append(self._calibrated())

    def disturbance(self, run: Callable[[], object]) -> float:
        """Runs, and returns how disturbed that was: at most 1 if it was calm."""
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
    """The times of each piece, round by round."""

    times: tuple[Mapping[str, Times], ...]
    repeated: int  # rounds that were thrown away
    disturbed: int  # disturbed rounds that were kept, because there were too many


def interleaved(pieces: Mapping[str, Piece], *, rounds: int, meter: DisturbanceMeter) -> Rounds:
    """The times of ``rounds`` calm rounds. Each runs every piece, and begins with another piece than the last.

    At most ``rounds`` disturbed rounds are repeated; after that the least disturbed are kept.
    """
    calm: list[Mapping[str, Times]] = []
    noisy: list[tuple[float, Mapping[str, Times]]] = []
    with _settled():
        while len(calm) < rounds and len(calm) + len(noisy) < 2 * rounds:
            times: dict[str, Times] = {}
            turn = (len(calm) + len(noisy)) % len(pieces)
            disturbance = meter.disturbance(functools.partial(_run, pieces, turn, times))
            if disturbance <= 1:
                calm.append(times)
            else:
                noisy.append((disturbance, times))
    noisy.sort(key=lambda entry: entry[0])
    kept = [times for _, times in noisy[: rounds - len(calm)]]
    return Rounds((*calm, *kept), repeated=len(noisy) - len(kept), disturbed=len(kept))


def _run(pieces: Mapping[str, Piece], turn: int, times: dict[str, Times]) -> None:
    names = list(pieces)
    for name in names[turn:] + names[:turn]:
        times[name] = pieces[name]()


@contextmanager
def _settled() -> Iterator[None]:
    """Hides earlier objects from the garbage collector: otherwise a piece would pay for the objects of the others."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure_time(cell: Workload, methods: Sequence[Method], *, rounds: int, meter: DisturbanceMeter) -> list[Record]:
    """One record per method that fits the cell."""
    problem = cell.problem()
    fitting = [method for method in methods if method.fits(problem)]
    optimizers = [method for method in fitting if not method.exact]
    exact = [method for method in fitting if method.exact]
    units = [method for method in optimizers if method.name in (UNIT, HARDEST)]
    common = {"kind": "time", "panel": cell.panel, "cell": cell.name, "title": cell.title, "batch": cell.batch}
    common |= {"parameters": problem.parameters, "headline": cell.headline}
    records = _measure_some(cell, optimizers, rounds=rounds, meter=meter)
    if exact:
        records += _measure_some(cell, [*units, *exact], rounds=min(rounds, _EXACT_ROUNDS), meter=meter)[len(units) :]
    return [{**common, **record} for record in records]


def _measure_some(cell: Workload, methods: Sequence[Method], *, rounds: int, meter: DisturbanceMeter) -> list[Record]:
    with known_warnings():
        steps = {method.name: method.step(cell.problem()) for method in methods}
        for method in methods:
            # in the first period of ``every`` each step computes curvature
            for _ in range(1 if method.exact else max(_WARM_UP, 2 * method.period)):
                steps[method.name]()
        shortest = min(timed(steps[UNIT], 1)[0] for _ in range(_WARM_UP))
        warm = not any(method.exact for method in methods)
        count = min(_MOST, math.ceil(_PIECE / shortest)) if warm else 1
        # whole periods, so that every piece has the same share of cheap steps
        counts = {method.name: method.period * math.ceil(count / method.period) for method in methods}
        pieces = {name: functools.partial(timed, step, counts[name], warm=warm) for name, step in steps.items()}
        measured = interleaved(pieces, rounds=rounds, meter=meter)
    return [
        {
            "optimizer": method.name,
            "exact": method.exact,
            "steps": counts[method.name],
            **_summary(measured, method.name),
        }
        for method in methods
    ]


def timed(step: Step, count: int, *, warm: bool = True) -> Times:
    """Seconds per step, and of backward and update alone, after one more step that fills the caches."""
    clock = time.perf_counter
    whole = part = 0.0
    if warm:
        step()
    for _ in range(count):
        start = clock()
        loss = step.forward()
        middle = clock()
        step.backward(loss)
        step.update()
        updated = clock()
        step.clear()
        end = clock()
        whole, part = whole + end - start, part + updated - middle
    return whole / count, part / count


def _summary(measured: Rounds, name: str) -> dict[str, Any]:
    """Median seconds, median ratios to Adam and fused Adam in the same round, quartiles of the ratio to Adam."""
    record: dict[str, Any] = {
        "rounds": len(measured.times),
        "repeated": measured.repeated,
        "disturbed": measured.disturbed,
    }
    for way, ending in enumerate(WAYS):
        seconds = [times[name][way] for times in measured.times]
        ratios = [times[name][way] / times[UNIT][way] for times in measured.times]
        record[f"seconds{ending}"] = median(seconds)
        record[f"ratio{ending}"] = median(ratios)
        record[f"quartiles{ending}"] = quantiles(ratios, n=4)[::2] if len(ratios) > 1 else 2 * ratios
        record[f"ratio_to_fused{ending}"] = median(t[name][way] / t[HARDEST][way] for t in measured.times)
    return record


def measure_memory(cell: Workload, methods: Iterable[Method]) -> list[Record]:
    """One record per method that fits the cell."""
    problem = cell.problem()
    fitting = [method for method in methods if not method.exact and method.fits(problem)]
    common = {"kind": "memory", "cell": cell.name, "title": cell.title, "batch": cell.batch}
    common |= {"parameters": problem.parameters}
    del problem
    peaks = {method.name: peak_of_step(cell, method) for method in fitting}
    return [
        {**common, "optimizer": name, "peak": peak, "between_steps": kept, "ratio": peak / peaks[UNIT][0]}
        for name, (peak, kept) in peaks.items()
    ]


def peak_of_step(cell: Workload, method: Method) -> tuple[int, int]:
    """Bytes at the peak of a step, and between steps."""

    def run() -> None:
        step = method.step(cell.problem())
        for _ in range(2):  # in the second step all state is in place
            step()
        with record_function(_LAST):
            step()

    gc.collect()
    release()  # otherwise scratch memory of an earlier model would count until it is freed
    with known_warnings():
        return peak_bytes(run)


def peak_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """The most bytes alive in the part of ``run`` recorded as its last step, and those alive when that begins."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would announce itself on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        run()
    events: list[Any] = profiled.profiler.kineto_results.events()
    start, end = next((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == _LAST)
    changes = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"),
        key=lambda change: change[0],
    )
    alive = list(accumulate(nbytes for _, nbytes in changes))
    before = sum(nbytes for moment, nbytes in changes if moment < start)
    during = [total for (moment, _), total in zip(changes, alive, strict=True) if start <= moment <= end]
    return max(before, *during), before
