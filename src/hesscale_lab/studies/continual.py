"""What forgets least: five tasks one after another, with EWC by several diagonals, plain L2, or nothing against it.

Permuted MNIST: every task has its own order of pixels. Split MNIST: 0 or 1, then 2 or 3, and so on, with the same two
outputs for all (is the digit odd?). Penalties are made comparable by the mean of the first task's diagonal; then the
same strengths are tried for each, on images apart, with a seed apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hesscale.applications.consolidation import EWC

from ..batches import generator_for
from ..tasks.networks import mlp
from ..tasks.table import TASKS
from .diagonals import DIAGONALS
from .reading import Record

Images = tuple[Tensor, Tensor]

METHODS: Mapping[str, str | None] = {
    "none": None,
    "L2": "ones",
    "EWC, g² per example": "g² per example",
    "EWC, HesScale": "HesScale",
    "EWC, HesScaleGN": "HesScaleGN",
    "EWC, HesScale rank=3": "HesScale rank=3",
}
"""What holds weights back, by the name of its diagonal."""
_BATCH, _LR, _TASKS = 64, 1e-3, 5
_SEARCH = 100  # the seed of the search


@dataclass(frozen=True)
class Task:
    """The images of one task."""

    train: Images
    valid: Images  # training images that nobody trains on, for the search
    test: Images


@dataclass(frozen=True)
class Benchmark:
    """How five tasks are made of MNIST."""

    outputs: int
    strengths: tuple[float, ...]  # that are tried for every method
    belongs: Callable[[Tensor, int], Tensor]  # of labels and a task, which images are the task's
    seen: Callable[[Images, int, int], Images]  # of images, a task and a seed, what the network is shown


def _permuted(images: Images, task: int, seed: int) -> Images:
    order = torch.randperm(images[0].shape[1], generator=generator_for(seed, "pixels", task))
    return images[0][:, order], images[1]


BENCHMARKS: Mapping[str, Benchmark] = {
    "permuted MNIST": Benchmark(
        outputs=10,
        strengths=(3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0),
        belongs=lambda labels, task: torch.ones_like(labels, dtype=torch.bool),
        seen=_permuted,
    ),
    "split MNIST": Benchmark(
        outputs=2,
        strengths=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        belongs=lambda labels, task: labels // 2 == task,
        seen=lambda images, *_: (images[0], images[1] % 2),
    ),
}


def settings(quick: bool) -> dict[str, Any]:
    """What config.json says; quick: one seed, fewer strengths and images."""
    return {
        "benchmarks": [*BENCHMARKS],
        "methods": [*METHODS],
        "strengths": {name: [*row.strengths[:: 3 if quick else 1]] for name, row in BENCHMARKS.items()},
        "seeds": [*range(1 if quick else 5)],
        "train": 1000 if quick else 5000,
        "epochs": 2,
        "curvature": 200 if quick else 500,
        "measured": 1000,
    }


def cells(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Benchmark and method."""
    return [(benchmark, method) for benchmark in config["benchmarks"] for method in config["methods"]]


def measure_cell(
    cell: tuple[Any, ...], config: Mapping[str, Any], *, data: Path | None, folder: Path
) -> Iterator[dict[str, Any]]:
    """The search for a strength, a record each, and then every seed with the best."""
    benchmark, method = cell
    tried = [0.0] if METHODS[method] is None else config["strengths"][benchmark]
    common = {"kind": "continual", "benchmark": benchmark, "method": method}
    found: dict[float, Outcome] = {}
    for strength in tried if len(tried) > 1 else ():
        found[strength] = learn(benchmark, method, strength, _SEARCH, config, data, search=True)
        yield {**common, "role": "search", "seed": _SEARCH, "strength": strength, **found[strength].as_record()}
    best = max(found, key=lambda strength: found[strength].accuracy) if found else tried[0]
    for seed in config["seeds"]:
        outcome = learn(benchmark, method, best, seed, config, data)
        yield {**common, "role": "seed", "seed": seed, "strength": best, **outcome.as_record()}


@dataclass(frozen=True)
class Outcome:
    """Accuracies [after task, on task], of tasks seen so far."""

    accuracies: tuple[tuple[float, ...], ...]

    @property
    def accuracy(self) -> float:
        """The mean over all tasks at the end."""
        return sum(self.accuracies[-1]) / len(self.accuracies[-1])

    @property
    def forgetting(self) -> float:
        """How far, in the mean over all tasks but the last, the accuracy at the end is below its best before."""
        last = self.accuracies[-1]
        lost = [max(row[k] for row in self.accuracies[k:]) - last[k] for k in range(len(last) - 1)]
        return sum(lost) / len(lost)

    def as_record(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {"accuracy": self.accuracy, "forgetting": self.forgetting, "at_the_end": [*self.accuracies[-1]]}


def learn(
    benchmark: str,
    method: str,
    strength: float,
    seed: int,
    config: Mapping[str, Any],
    data: Path | None,
    *,
    search: bool = False,
) -> Outcome:
    """Trains on one task after another; measured on the test images, or on those for the search."""
    tasks = tasks_of(benchmark, seed, config, data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(784, 100, 100, BENCHMARKS[benchmark].outputs, activation=nn.Tanh)
    penalty, scale, diagonal = EWC(model, strength=strength), 0.0, METHODS[method]
    rows = []
    for number, task in enumerate(tasks):
        train(model, penalty if strength else None, task.train, config["epochs"], generator_for(seed, "order", number))
        measured = [one.valid if search else one.test for one in tasks[: number + 1]]
        rows.append(tuple(accuracy(model, images) for images in measured))
        if diagonal is None:
            continue
        x, y = (part[: config["curvature"]] for part in task.train)
        batches = [*zip(x.split(100), y.split(100), strict=True)]
        found = DIAGONALS[diagonal](model, batches, generator_for(seed, "curvature", number))
        scale = scale or 1 / mean_size(found.values())
        penalty.consolidate(diagonal=found, weight=scale)
    return Outcome(tuple(rows))


def mean_size(values: Any) -> float:
    """The mean of |h| over all entries."""
    return float(torch.cat([value.flatten() for value in values]).abs().mean())


def tasks_of(benchmark: str, seed: int, config: Mapping[str, Any], data: Path | None) -> list[Task]:
    """The five tasks of this seed: its own training images, and its own orders of pixels."""
    training, test = _load(data)
    row, count, measured = BENCHMARKS[benchmark], config["train"], config["measured"]
    order = torch.randperm(len(training[1]), generator=generator_for(seed, "images"))
    found = []
    for number in range(_TASKS):
        own = order[row.belongs(training[1][order], number)]
        asked = row.belongs(test[1], number).nonzero().flatten()[:measured]
        pieces = (training, own[:-measured][:count]), (training, own[-measured:]), (test, asked)
        found.append(Task(*(row.seen((x[places], y[places]), number, seed) for (x, y), places in pieces)))
    return found


@functools.lru_cache(maxsize=1)
def _load(data: Path | None) -> tuple[Images, Images]:
    task = TASKS["mnist-mlp"]
    (x, y), (z, w) = task.load(data)
    return (task.prepare(x).flatten(1), y), (task.prepare(z).flatten(1), w)


def train(model: nn.Module, penalty: EWC | None, images: Images, epochs: int, generator: torch.Generator) -> None:
    """Trains in place with Adam, which begins afresh with every task."""
    optimizer = torch.optim.Adam(model.parameters(), lr=_LR)
    x, y = images
    for _ in range(epochs):
        for places in torch.randperm(len(y), generator=generator).split(_BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[places]), y[places])
            (loss if penalty is None else loss + penalty()).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """The share of right answers."""
    return float((model(images[0]).argmax(1) == images[1]).double().mean())


def is_record(record: Record) -> bool:
    """Whether a record has what tables and figures need."""
    words = all(isinstance(record[key], str) for key in ("benchmark", "method", "role"))
    numbers: Sequence[Any] = [record["strength"], record["accuracy"], record["forgetting"], *record["at_the_end"]]
    return words and isinstance(record["seed"], int) and all(isinstance(value, float | int) for value in numbers)
