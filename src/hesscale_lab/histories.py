"""What a training measured, epoch by epoch: sweeps choose by it, reports draw it."""

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
    """How far a training came."""

    FINISHED = "finished"
    NOT_FINITE = "not finite"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class History:
    """One value per epoch and metric; index 0 is before training."""

    values: Mapping[str, tuple[float, ...]]
    seconds: tuple[float, ...]  # of training since the start; nan for epochs that the run did not reach
    state: State

    @property
    def epochs(self) -> int:
        """The last epoch."""
        return len(self.seconds) - 1

    @property
    def area(self) -> float:
        """The area under the validation loss, by which the authors chose: Σ over epochs 0 … E."""
        return math.fsum(self.values["valid_loss"])


def read_history(run: Run) -> History | None:
    """What the run measured; None before its first evaluation.

    After a run became not finite, its values of epoch 0 are used, as in the authors' harness (DeepOBS): so it counts
    against an average over seeds, and no NaN hides the other seeds.
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
    """Whether the training came to its end or became not finite, and no epoch before that is missing."""
    return _is_complete(run, *_read(run))


def _is_complete(run: Run, by_epoch: Mapping[int, Any], end: Mapping[str, Any]) -> bool:
    if not end:
        return False
    count = end["epoch"] if end["reason"] == State.NOT_FINITE else run.config["epochs"] + 1
    return all(epoch in by_epoch for epoch in range(count))


def _read(run: Run) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The records by epoch, and the record of the end, empty if the run has not ended."""
    by_epoch: dict[int, dict[str, Any]] = {}
    end: dict[str, Any] = {}
    for number, record in enumerate(run.records, start=1):
        match record:
            case {"kind": "epoch", "epoch": int(), "seconds": int() | float() as seconds, **rest} if (
                0 <= seconds < math.inf and all(isinstance(rest.get(name, ""), int | float | None) for name in METRICS)
            ):
                by_epoch[record["epoch"]] = record
            case {"kind": "end", "epoch": int(), "reason": str()}:
                end = record
            case {"kind": "epoch" | "end"}:
                raise run.damaged(number)
    return by_epoch, end


def _is_finite(record: Mapping[str, Any]) -> bool:
    return all(record[name] is not None and math.isfinite(record[name]) for name in METRICS)
