"""The examples of a run: the split, the batches of an epoch, the sets that are measured.

Each purpose and epoch has its own generator, made from the run's seed, so an epoch can be repeated alone. As in the
authors' code only full batches count, in measuring as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .tasks.task import Labelled, Task

_AT_ONCE = 128
"""How many examples are measured together; more would be slower, because large activations are new memory."""


def generator_for(seed: int, purpose: str, *more: int) -> torch.Generator:
    """The generator of a run for one purpose, always in the same state."""
    digest = hashlib.sha256(" ".join([purpose, *map(str, (seed, *more))]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@dataclass(frozen=True)
class Data:
    """The examples of a run: a task's, split by its seed."""

    task: Task
    seed: int
    examples: Tensor
    labels: Tensor
    test: Labelled
    train: Tensor  # indices of examples
    valid: Tensor
    pool: Tensor  # of which the training loss is measured: in the authors' code all examples, also those of valid

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return len(self.train) // self.task.batch

    def epoch(self, epoch: int) -> Iterator[Labelled]:
        """The batches of an epoch in a random order, as the network's input and labels."""
        order = generator_for(self.seed, "order", epoch)
        changes = generator_for(self.seed, "augmentation", epoch)
        shuffled = self.train[torch.randperm(len(self.train), generator=order)]
        for rows in shuffled[: self.steps * self.task.batch].split(self.task.batch):
            yield self.task.prepare(self.examples[rows], changes), self.labels[rows]

    def measured(self, epoch: int) -> dict[str, Iterator[Labelled]]:
        """The three sets that are measured after an epoch; the first is drawn and augmented again each time."""
        draw = generator_for(self.seed, "measured", epoch)
        drawn = self.pool[torch.randperm(len(self.pool), generator=draw)[: self.task.measured]]
        return {
            "train": self._pieces(self.examples, self.labels, drawn, draw),
            "valid": self._pieces(self.examples, self.labels, self.valid, None),
            "test": self._pieces(*self.test, torch.arange(len(self.test[1])), None),
        }

    def _pieces(
        self, examples: Tensor, labels: Tensor, rows: Tensor, changes: torch.Generator | None
    ) -> Iterator[Labelled]:
        full = len(rows) // self.task.batch * self.task.batch
        for piece in rows[:full].split(_AT_ONCE):
            yield self.task.prepare(examples[piece], changes), labels[piece]


def load(task: Task, *, seed: int, subset: int | None = None, folder: Path | None = None) -> Data:
    """A task's examples, split at random into training and validation. ``subset``: how many to train with.

    The training loss of a subset is measured on the subset only.
    """
    (examples, labels), test = task.load(folder)
    order = torch.randperm(len(examples), generator=generator_for(seed, "split"))
    held = task.held_back(len(examples))
    valid, train = order[:held], order[held:]
    if subset is not None and subset > len(train):
        raise ValueError(f"there are {len(train)} training examples, not {subset}")
    train = train[:subset]
    pool = order if subset is None else train
    data = Data(task, seed, examples, labels, test, train, valid, pool)
    smallest = min(len(train), len(valid), len(test[1]), len(pool))
    if smallest < task.batch:
        raise ValueError(f"{smallest} examples are less than one batch of {task.batch}")
    return data
