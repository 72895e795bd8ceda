"""The tables of the study of continual learning, for the terminal, the page and its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..studies.reading import Record
from ..wording import counted, power
from .estimate import estimate, percent
from .table import Table, csv_text


def continual_tables(config: Mapping[str, Any], records: Sequence[Record]) -> Iterator[Table]:
    """Average accuracy and forgetting by method, a table per benchmark."""
    for benchmark in config["benchmarks"]:
        own = [record for record in records if record["benchmark"] == benchmark and record["role"] == "seed"]
        rows = []
        for method in config["methods"]:
            some = [record for record in own if record["method"] == method]
            if some:
                found = (percent(estimate([record[key] for record in some])) for key in ("accuracy", "forgetting"))
                first = estimate([record["at_the_end"][0] for record in some])
                strength = some[0]["strength"]
                rows.append((method, *found, percent(first), power(strength) if strength else ""))
        if rows:
            seeds = counted(len({record["seed"] for record in own}), "seed")
            yield Table(
                f"Five tasks one after another, in percent: {benchmark}, {seeds}",
                ("method", "average accuracy", "forgetting", "first task", "strength"),
                tuple(rows),
                "At the end, means ± standard errors. Forgetting: below the best that a task ever had. Strength: the "
                f"best of {', '.join(map(power, config['strengths'][benchmark]))} elsewhere, over mean |h| of task 1.",
            )


def as_csv(records: Sequence[Record]) -> str:
    """Every record, of the search as well, a row each."""
    keys = ("benchmark", "method", "role", "strength", "seed", "accuracy", "forgetting")
    rows = ([f"{value:.4g}" if isinstance(value := one[key], float) else value for key in keys] for one in records)
    return csv_text(keys, rows)
