"""What one training measured, epoch by epoch: read from its run folder, by sweeps to choose and by reports to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .runs import Run

SPLITS, QUANTITIES = ("train", "valid", "test"), ("loss", "accuracy")
METRICS = tuple(f"{split}_{quantity}" for quantity in QUANTITIES for split in SPLITS)


class State(StrEnum):
    """How a training stands."""

    FINISHED = "finished"
    NOT_FINITE = "not finite"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class History:
    """One value per epoch and metric; index 0 is before training."""

    values: Mapping[str, tuple[float, ...]]
    seconds: tuple[float, ...]  # of training so far; nan where the run never came
    state: State

    @property
    def epochs(self) -> int:
        """The last epoch there are values for."""
        return len(self.seconds) - 1

    @property
    def area(self) -> float:
        """The area under the validation loss, by which the authors chose: Σ over epochs 0 … E."""
        return math.fsum(self.values["valid_loss"])


def read_history(run: Run) -> History | None:
    """What the run measured; None before its first evaluation.

    A run that became not finite goes on with its values of epoch 0, as in the authors' harness (DeepOBS): an average
    over seeds then pays for it, and no NaN hides the other seeds.
    """
    by_epoch, end = _read(run)
    measured: list[dict[str, Any]] = []
    while len(measured) in by_epoch and _is_finite(by_epoch[len(measured)]):
        measured.append(by_epoch[len(measured)])
    if not measured:
        return None
    ended = _is_complete(run, by_epoch, end)
    broke = (ended and end["reason"] == State.NOT_FINITE) or len(measured) in by_epoch
    missing = max(0, run.config["epochs"] + 1 - len(measured)) if broke else 0
    return History(
        values={name: tuple(float(r[name]) for r in [*measured, *measured[:1] * missing]) for name in METRICS},
        seconds=(*(float(record["seconds"]) for record in measured), *[math.nan] * missing),
        state=State.NOT_FINITE if broke else State.FINISHED if ended else State.UNFINISHED,
    )


def is_finished(run: Run) -> bool:
    """Whether the training came to its end, or was stopped by a value that was not finite, and no epoch is missing."""
    return _is_complete(run, *_read(run))


def _is_complete(run: Run, by_epoch: Mapping[int, Any], end: Mapping[str, Any]) -> bool:
    if not end:
        return False
    count = end["epoch"] if end["reason"] == State.NOT_FINITE else run.config["epochs"] + 1
    return all(epoch in by_epoch for epoch in range(count))


def _read(run: Run) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The records by epoch, and the one that says how the run ended, empty if it has not."""
    by_epoch: dict[int, dict[str, Any]] = {}
    end: dict[str, Any] = {}
    for number, record in enumerate(run.records, start=1):
        if not _is_whole(record):
            raise run.damaged(number)
        if record["kind"] == "epoch":
            by_epoch[record["epoch"]] = record
        elif record["kind"] == "end":
            end = record
    return by_epoch, end


def _is_whole(record: Mapping[str, Any]) -> bool:
    match record:
        case {"kind": "epoch", "epoch": int(), "seconds": int() | float() as seconds, **rest}:
            return 0 <= seconds < math.inf and all(
                name in rest and isinstance(rest[name], int | float | None) for name in METRICS
            )
        case {"kind": "end", "epoch": int(), "reason": str()}:
            return True
    return record["kind"] not in ("epoch", "end")


def _is_finite(record: Mapping[str, Any]) -> bool:
    return all(record[name] is not None and math.isfinite(record[name]) for name in METRICS)
