"""The peak of memory during a step: bytes of all tensors that are alive at once, as torch's allocator reports them.

Counted are parameters, inputs, optimizer state and whatever is kept from step to step, as well as what a step needs on
its way. Work space that libraries such as oneDNN get from elsewhere is not: the figures are exact, repeatable and do
not depend on how an allocator rounds.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from hesscale.fast.workspace import release

from ..tasks.cost_networks import Cell
from .optimizer_steps import UNIT, Method, known_warnings

_LAST = "last step"
_WARM_UP = 2  # the second step is the first with all state in place


def measure(cell: Cell, methods: Iterable[Method]) -> list[dict[str, Any]]:
    """One record per method that fits the cell."""
    problem = cell.problem()
    fitting = [method for method in methods if not method.exact and method.fits(problem)]
    common = {"kind": "memory", "cell": cell.name, "title": cell.title, "batch": cell.batch}
    common |= {"parameters": problem.parameters}
    del problem
    peaks = {method.name: peak_of_step(cell, method) for method in fitting}
    return [
        {**common, "optimizer": name, "peak": peak, "between_steps": rest, "ratio": peak / peaks[UNIT][0]}
        for name, (peak, rest) in peaks.items()
    ]


def peak_of_step(cell: Cell, method: Method) -> tuple[int, int]:
    """Bytes at the peak of a step, and between steps."""

    def run() -> None:
        step = method.step(cell.problem())
        for _ in range(_WARM_UP):
            step()
        with record_function(_LAST):
            step()

    gc.collect()
    release()  # what a model before this one has left is not to be counted when it goes
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
