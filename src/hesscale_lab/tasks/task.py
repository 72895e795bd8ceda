"""A task is examples, a network and a loss; the rows of the table and a user's tasks are of this class."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Labelled = tuple[Tensor, Tensor]
"""Examples and their labels, as many of one as of the other."""


@dataclass(frozen=True)
class Field:
    """How a field of a task is given as text, and which values it may have."""

    read: Callable[[str], Any]  # ValueError if it is no such value
    fits: Callable[[Any], bool]
    values: str  # in words

    def refuse(self, name: str, value: Any) -> ValueError:
        """The error that says what it may be."""
        return ValueError(f"{name} must be {self.values}, not {value!r}")


class Choice(Field):
    """A field with a few values, each a word."""

    def __init__(self, *words: str) -> None:
        super().__init__(str, lambda value: value in words, ", ".join(words))

    def refuse(self, name: str, value: Any) -> ValueError:
        return ValueError(f"unknown {name} {value!r}: choose among {self.values}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


WHOLE = Field(int, lambda value: isinstance(value, int) and value > 0, "a positive whole number")
POSITIVE = Field(float, lambda value: _is_finite(value) and value > 0, "a positive number")
NOT_NEGATIVE = Field(float, lambda value: _is_finite(value) and value >= 0, "a number from 0")
WORDS = Field(str, lambda value: isinstance(value, str) and value.isprintable() and bool(value), "some words")


@dataclass(frozen=True)
class Task(ABC):
    """Examples, a network and a loss. A task defines ``load`` and ``make``, and overrides what else it needs.

    The user can change the fields in ``FIELDS``, as ``--field name=value``.
    """

    title: str
    epochs: int
    batch: int = 128
    weight_decay: float = 0.0
    validation: float = 10_000  # training examples held back; below 1: this part of them
    measured: int = 10_000  # training examples that the training loss is measured on
    fused: bool = True  # compiling the optimizer's update pays in runs of minutes

    FIELDS: ClassVar[Mapping[str, Field]] = {"batch": WHOLE, "weight_decay": NOT_NEGATIVE}

    @abstractmethod
    def load(self, folder: Path | None) -> tuple[Labelled, Labelled]:
        """Training and test examples; ``folder`` is --data."""

    def digest(self, folder: Path | None) -> str | None:
        """A fingerprint of the data, if it is a file of the user's: runs on another file are other runs."""
        return None

    @abstractmethod
    def make(self, generator: torch.Generator) -> nn.Module:
        """The network, freshly initialized from this generator."""

    def prepare(self, examples: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The network's input from a batch; with a generator, augmented where the task augments."""
        return examples

    def loss(self, outputs: Tensor, labels: Tensor, *, reduction: str = "mean") -> Tensor:
        """Cross-entropy; a network has a row of logits for every label."""
        return F.cross_entropy(outputs, labels.flatten(), reduction=reduction)

    def right(self, outputs: Tensor, labels: Tensor) -> float:
        """The number of right answers."""
        return float((outputs.argmax(1) == labels.flatten()).sum())

    def held_back(self, count: int) -> int:
        """How many of ``count`` training examples are for validation."""
        return round(self.validation * count) if self.validation < 1 else int(self.validation)

    def with_fields(self, fields: Sequence[tuple[str, Any]]) -> Self:
        """This task with other values in some FIELDS; ValueError if there is no such field or value."""
        for name, value in fields:
            if not self._field(name).fits(value):
                raise self._field(name).refuse(name, value)
        return replace(self, **dict(fields))

    def parse_fields(self, texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
        """Fields given as ``name=value``, sorted by name; of a name that is given twice, the last."""
        return tuple(sorted(dict(map(self._parse, texts)).items()))

    def _parse(self, text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"a field is given as name=value, not {text!r}")
        field = self._field(name)
        try:
            parsed = field.read(value)
        except ValueError:
            raise field.refuse(name, value) from None
        if not field.fits(parsed):
            raise field.refuse(name, parsed)
        return name, parsed

    def _field(self, name: str) -> Field:
        if name not in self.FIELDS:
            raise ValueError(f"unknown field {name!r}: choose among {', '.join(self.FIELDS)}")
        return self.FIELDS[name]
