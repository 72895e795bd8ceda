"""What forgets least: five tasks one after another, with EWC by several diagonals, plain L2, or no penalty.

Permuted MNIST: every task has its own order of pixels. Split MNIST: 0 or 1, then 2 or 3, and so on, with the same two
outputs for all (is the digit odd?). The mean of the first task's diagonal makes penalties comparable; then each method
tries the same strengths, on images and with a seed of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor, nn

from hesscale.applications.consolidation import EWC

from ..batches import generator_for
from ..figures import Color, Plot, draw_line, legend_of_all, tidy, verbatim
from ..tasks.networks import mlp
from ..tasks.table import TASKS
from ..wording import Table, counted, estimate, percent, power
from .applications import DIAGONALS, accuracy, images_of, train
from .study import Cell, Config, Record, Records, Study, has, is_number, is_whole, is_word

Images = tuple[Tensor, Tensor]

METHODS: Mapping[str, tuple[str | None, str, str]] = {
    "none": (None, Color.GRAY, "X"),
    "L2": ("ones", Color.BLACK, "P"),
    "EWC, g² per example": ("g² per example", Color.VERMILION, "D"),
    "EWC, HesScale": ("HesScale", Color.BLUE, "o"),
    "EWC, HesScaleGN": ("HesScaleGN", Color.SKY, "s"),
    "EWC, HesScale rank=3": ("HesScale rank=3", Color.ORANGE, "^"),
}
"""The diagonal of each method's penalty, and the method's color and marker."""
_BATCH, _TASKS = 64, 5
_SEARCH = 100  # the seed of the search
_MNIST = TASKS["mnist-mlp"]


@dataclass(frozen=True)
class TaskImages:
    """The images of one task."""

    train: Images
    valid: Images  # training images that are held back for the search
    test: Images


@dataclass(frozen=True)
class Benchmark:
    """How MNIST becomes five tasks."""

    outputs: int
    strengths: tuple[float, ...]  # that every method tries
    belongs: Callable[[Tensor, int], Tensor]  # from labels and a task to a mask of the task's images
    shown: Callable[[Images, int, int], Images]  # from images, a task and a seed to the network's input


def _permuted(images: Images, task: int, seed: int) -> Images:
    order = torch.randperm(images[0].shape[1], generator=generator_for(seed, "pixels", task))
    return images[0][:, order], images[1]


BENCHMARKS: Mapping[str, Benchmark] = {
    "permuted MNIST": Benchmark(
        outputs=10,
        strengths=(3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0),
        belongs=lambda labels, task: torch.ones_like(labels, dtype=torch.bool),
        shown=_permuted,
    ),
    "split MNIST": Benchmark(
        outputs=2,
        strengths=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        belongs=lambda labels, task: labels // 2 == task,
        shown=lambda images, *_: (images[0], images[1] % 2),
    ),
}


def settings(quick: bool) -> Config:
    """The content of config.json; quick: one seed, fewer strengths and images."""
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


def cells(config: Config) -> list[Cell]:
    """Benchmark and method."""
    return [(benchmark, method) for benchmark in config["benchmarks"] for method in config["methods"]]


def measure(cell: Cell, config: Config, *, data: Path | None, folder: Path) -> Iterator[Record]:
    """A record for each strength of the search, then one for each seed with the best strength."""
    benchmark, method = cell
    strengths = [0.0] if METHODS[method][0] is None else config["strengths"][benchmark]
    common = {"kind": "continual", "benchmark": benchmark, "method": method}
    outcomes: dict[float, Outcome] = {}
    for strength in strengths if len(strengths) > 1 else ():
        outcomes[strength] = learn(benchmark, method, strength, _SEARCH, config, data, search=True)
        yield {**common, "role": "search", "seed": _SEARCH, "strength": strength, **outcomes[strength].as_record()}
    best = max(outcomes, key=lambda strength: outcomes[strength].accuracy) if outcomes else strengths[0]
    for seed in config["seeds"]:
        outcome = learn(benchmark, method, best, seed, config, data)
        yield {**common, "role": "seed", "seed": seed, "strength": best, **outcome.as_record()}


@dataclass(frozen=True)
class Outcome:
    """Accuracies [after task, on task], for the tasks seen so far."""

    accuracies: tuple[tuple[float, ...], ...]

    @property
    def accuracy(self) -> float:
        """The mean over all tasks at the end."""
        return sum(self.accuracies[-1]) / len(self.accuracies[-1])

    @property
    def forgetting(self) -> float:
        """The mean, over all tasks but the last, of the best accuracy before the end minus that at the end."""
        last = self.accuracies[-1]
        lost = [max(row[k] for row in self.accuracies[k:]) - last[k] for k in range(len(last) - 1)]
        return sum(lost) / len(lost)

    def as_record(self) -> dict[str, Any]:
        """The entries of metrics.jsonl."""
        return {"accuracy": self.accuracy, "forgetting": self.forgetting, "at_the_end": [*self.accuracies[-1]]}


def learn(
    benchmark: str,
    method: str,
    strength: float,
    seed: int,
    config: Config,
    data: Path | None,
    *,
    search: bool = False,
) -> Outcome:
    """Trains on one task after another; measures on the test images, or on the validation images of the search."""
    tasks = tasks_of(benchmark, seed, config, data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(784, 100, 100, BENCHMARKS[benchmark].outputs, activation=nn.Tanh)
    penalty, scale, diagonal = EWC(model, strength=strength), 0.0, METHODS[method][0]
    rows = []
    for number, task in enumerate(tasks):
        order = generator_for(seed, "order", number)
        train(model, shuffled(task.train, config["epochs"], order), penalty if strength else None)
        measured = [one.valid if search else one.test for one in tasks[: number + 1]]
        rows.append(tuple(accuracy(model, [images]) for images in measured))
        if diagonal is None:
            continue
        x, y = (part[: config["curvature"]] for part in task.train)
        batches = [*zip(x.split(100), y.split(100), strict=True)]
        curvature = DIAGONALS[diagonal](model, batches, generator_for(seed, "curvature", number))
        scale = scale or 1 / mean_size(curvature.values())
        penalty.consolidate(diagonal=curvature, weight=scale)
    return Outcome(tuple(rows))


def mean_size(values: Any) -> float:
    """The mean of |h| over all entries."""
    return float(torch.cat([value.flatten() for value in values]).abs().mean())


def tasks_of(benchmark: str, seed: int, config: Config, data: Path | None) -> list[TaskImages]:
    """The five tasks of this seed, which has its own training images and its own orders of pixels."""
    training, test = images_of(_MNIST, data)
    row, count, measured = BENCHMARKS[benchmark], config["train"], config["measured"]
    order = torch.randperm(len(training[1]), generator=generator_for(seed, "images"))
    tasks = []
    for number in range(_TASKS):
        chosen = order[row.belongs(training[1][order], number)]
        tested = row.belongs(test[1], number).nonzero().flatten()[:measured]
        pieces = (training, chosen[:-measured][:count]), (training, chosen[-measured:]), (test, tested)
        tasks.append(TaskImages(*(row.shown(_prepared(x[rows], y[rows]), number, seed) for (x, y), rows in pieces)))
    return tasks


def _prepared(x: Tensor, y: Tensor) -> Images:
    return _MNIST.prepare(x).flatten(1), y


def shuffled(images: Images, epochs: int, generator: torch.Generator) -> Iterator[Images]:
    """Batches of some epochs, each in a random order."""
    x, y = images
    for _ in range(epochs):
        for rows in torch.randperm(len(y), generator=generator).split(_BATCH):
            yield x[rows], y[rows]


def tables(config: Config, records: Records) -> Iterator[Table]:
    """Average accuracy and forgetting by method, a table per benchmark."""
    for benchmark in config["benchmarks"]:
        measured = [record for record in records if record["benchmark"] == benchmark and record["role"] == "seed"]
        rows = []
        for method in config["methods"]:
            some = [record for record in measured if record["method"] == method]
            if some:
                means = (percent(estimate([record[key] for record in some])) for key in ("accuracy", "forgetting"))
                first = percent(estimate([record["at_the_end"][0] for record in some]))
                strength = some[0]["strength"]
                rows.append((method, *means, first, power(strength) if strength else ""))
        if rows:
            yield Table(
                "Five tasks one after another, in percent: "
                f"{benchmark}, {counted(len({record['seed'] for record in measured}), 'seed')}",
                ("method", "average accuracy", "forgetting", "first task", "strength"),
                tuple(rows),
                "At the end, means ± standard errors. Forgetting: below the best that a task ever had. Strength: the "
                f"best of {', '.join(map(power, config['strengths'][benchmark]))} elsewhere, over mean |h| of task 1.",
            )


def rows(records: Records) -> Iterator[Record]:
    """Every record, those of the search as well."""
    for record in records:
        keys = ("benchmark", "method", "role", "strength", "seed", "accuracy", "forgetting")
        yield {key: f"{record[key]:.4g}" if isinstance(record[key], float) else record[key] for key in keys}


_CAPTION = (
    "Test accuracy on each of five tasks after the last was learned, means over seeds with bars of ± 2 standard "
    "errors, each method at the penalty strength that was best for it on images apart."
)


def figures(config: Config, records: Records) -> Iterator[Plot]:
    """The accuracy on each task at the end: a panel per benchmark, a line per method."""
    measured = [record for record in records if record["role"] == "seed"]
    benchmarks = [name for name in config["benchmarks"] if any(record["benchmark"] == name for record in measured)]
    if not benchmarks:
        return
    figure = Figure(figsize=(4.4 * len(benchmarks), 3.9), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(benchmarks), squeeze=False)[0]
    for axes, benchmark in zip(panels, benchmarks, strict=True):
        _draw(axes, [record for record in measured if record["benchmark"] == benchmark])
        axes.set_title(verbatim(benchmark), fontsize="medium")
    panels[0].set_ylabel("test accuracy at the end")
    legend_of_all(figure, panels, columns=3)
    yield Plot("continual", _CAPTION, figure)


def _draw(axes: Axes, records: Records) -> None:
    for number, (name, (_, color, marker)) in enumerate(METHODS.items()):
        accuracies = [record["at_the_end"] for record in records if record["method"] == name]
        if accuracies:
            values = [estimate(column) for column in zip(*accuracies, strict=True)]
            places = [task + 1 + 0.05 * (number - len(METHODS) / 2) for task in range(len(values))]
            draw_line(axes, places, values, color=color, marker=marker, label=name)
    axes.set_xlabel("task")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    tidy(axes)


_FIELDS = {
    **dict.fromkeys(("benchmark", "method", "role"), is_word),
    **dict.fromkeys(("strength", "accuracy", "forgetting"), is_number),
}
STUDY = Study(
    "what forgets least over five tasks of permuted and split MNIST (25 minutes)",
    settings,
    cells,
    ("benchmark", "method"),
    measure,
    {"continual": has(**_FIELDS, seed=is_whole, at_the_end=lambda values: all(map(is_number, values)))},
    tables,
    rows,
    figures,
)
