"""How much longer one piece of work takes than another: the only kind of time that can be compared between machines."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any


def ratio(benchmark: Any, ours: Callable[[], object], unit: Callable[[], object], *, rounds: int) -> float | None:
    """The median over interleaved rounds of the time of ``ours`` over that of ``unit``; None if benchmarks are off.

    ``benchmark`` is the fixture of pytest-benchmark, which reports the seconds of ``ours`` and this ratio. On a machine
    that others use, ``--benchmark-timer=time.process_time`` counts only what this process has had of it.
    """
    units: list[float] = []

    def time_unit() -> None:
        start = benchmark._timer()
        unit()
        units.append(benchmark._timer() - start)

    for _ in range(2):  # warm up, compile
        ours()
        unit()
    benchmark.pedantic(ours, setup=time_unit, rounds=rounds)
    if benchmark.stats is None:
        return None
    found = median(mine / other for mine, other in zip(benchmark.stats.stats.data, units, strict=True))
    benchmark.extra_info["ratio"] = round(found, 3)
    return found
