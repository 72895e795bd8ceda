"""What prunes best: accuracy against sparsity by saliency, and how each saliency ranks the true changes of the loss.

Networks are trained once per seed and kept in the run's folder. Saliencies come from a part of the training images.
The true change is that of the mean loss on the same images, in float64, when one weight, drawn at random, becomes zero.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor, nn
from torch.nn import functional as F

from hesscale.applications import pruning

from ..batches import generator_for
from ..figures import Color, Plot, draw_line, legend_of_all, tidy, verbatim
from ..tasks.networks import mlp
from ..tasks.table import TASKS
from ..tasks.task import Task
from ..wording import Table, counted, estimate, percent, plain
from .applications import DIAGONALS, Batches, Diagonal, accuracy, images_of, kept, train
from .study import Cell, Config, Record, Records, Study, by, has, is_number, is_whole, is_word

_BATCH = 128


@dataclass(frozen=True)
class Subject:
    """A network to prune, and how many images, weights and steps to use."""

    title: str
    task: Task
    make: Callable[[torch.Generator], nn.Module]
    flat: bool  # images as vectors
    train: int  # images
    epochs: int
    curvature: int  # images for saliencies
    test: int
    removed: int  # weights that are removed one by one
    steps: int  # of fine-tuning
    sparsities: tuple[float, ...] = (0.8, 0.9, 0.95)


def _seeded(make: Callable[[], nn.Module]) -> Callable[[torch.Generator], nn.Module]:
    def made(generator: torch.Generator) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            return make()

    return made


def _mlp(activation: type[nn.Module]) -> Callable[[torch.Generator], nn.Module]:
    return _seeded(functools.partial(mlp, 784, 128, 64, 10, activation=activation))


_CIFAR = TASKS["cifar10-3c3d"].with_fields([("activation", "relu"), ("width", 0.25)])
_SIZES: Mapping[str, Any] = {
    "train": 50_000,
    "epochs": 4,
    "curvature": 1000,
    "test": 10_000,
    "removed": 200,
    "steps": 60,
}
SUBJECTS: Mapping[str, Subject] = {
    "mlp-relu": Subject("MNIST, 784-128-64-10 ReLU", TASKS["mnist-mlp"], _mlp(nn.ReLU), True, **_SIZES),
    "mlp-tanh": Subject("MNIST, 784-128-64-10 tanh", TASKS["mnist-mlp"], _mlp(nn.Tanh), True, **_SIZES),
    "cnn": Subject(
        "CIFAR-10, 3C3D ReLU at a quarter of its width",
        _CIFAR,
        _CIFAR.make,
        False,
        train=10_000,
        epochs=8,
        curvature=400,
        test=2000,
        removed=100,
        steps=40,
        sparsities=(0.3, 0.5, 0.7),  # it is small and short of training: more leaves nothing to compare
    ),
}


@dataclass(frozen=True)
class Saliency:
    """How a saliency is made from a diagonal, and drawn."""

    diagonal: str  # a name in DIAGONALS
    color: str
    marker: str
    order: pruning.Order = "obd"
    clamped: bool = False  # negative entries count as 0, so their weights go first
    subjects: tuple[str, ...] = ("mlp-relu", "mlp-tanh", "cnn")


SALIENCIES: Mapping[str, Saliency] = {
    "magnitude": Saliency("ones", Color.BLACK, "P"),
    "g² per example": Saliency("g² per example", Color.GRAY, "X"),
    "HesScaleGN": Saliency("HesScaleGN", Color.SKY, "s"),
    "HesScale": Saliency("HesScale", Color.BLUE, "o"),
    "HesScale, h < 0 as 0": Saliency("HesScale", Color.BLUE, "1", clamped=True, subjects=("mlp-tanh",)),
    "HesScale, −gw + ½hw²": Saliency("HesScale", Color.PURPLE, "d", order="second"),
    "HesScale rank=1": Saliency("HesScale rank=1", Color.VERMILION, "v"),
    "HesScale rank=3": Saliency("HesScale rank=3", Color.ORANGE, "^"),
    "GGN-MC": Saliency("GGN-MC", Color.GREEN, "<"),
    "exact": Saliency("exact", Color.VIOLET, "*", subjects=("mlp-relu", "mlp-tanh")),
}
_COUNTS = ("train", "epochs", "curvature", "test", "removed", "steps")


def settings(quick: bool) -> Config:
    """The content of config.json; quick: one seed, and MLPs only."""
    subjects = ["mlp-relu", "mlp-tanh"] if quick else [*SUBJECTS]
    return {
        "subjects": subjects,
        "sizes": {name: {count: getattr(SUBJECTS[name], count) for count in _COUNTS} for name in subjects},
        "saliencies": [*SALIENCIES],
        "sparsities": {name: [*SUBJECTS[name].sparsities] for name in subjects},
        "seeds": [*range(1 if quick else 5)],
    }


def cells(config: Config) -> list[Cell]:
    """Network and seed; MLPs first, because they take seconds."""
    small = [name for name in config["subjects"] if SUBJECTS[name].flat]
    large = [name for name in config["subjects"] if name not in small]
    return [(name, seed) for some in (small, large) for seed in config["seeds"] for name in some]


def measure(cell: Cell, config: Config, *, data: Path | None, folder: Path) -> Iterator[Record]:
    """A record for each saliency: accuracies by sparsity, one-shot and fine-tuned, and the rank correlation."""
    name, seed = cell
    subject = SUBJECTS[name]
    images = _Images(subject, seed, data)
    model = trained(subject, images, seed, folder / f"{name}-{seed}.pt")
    batches = images.first(subject.curvature)
    truth = removals(model, batches, count=subject.removed, generator=generator_for(seed, "removed"))
    compute = functools.cache(lambda key: DIAGONALS[key](model, batches, generator_for(seed, "curvature")))
    for label in config["saliencies"]:
        saliency = SALIENCIES[label]
        if name not in saliency.subjects:
            continue
        diagonal: Diagonal = compute(saliency.diagonal)
        if saliency.clamped:
            diagonal = {name: h.clamp(min=0) for name, h in diagonal.items()}
        options: dict[str, Any] = {"order": saliency.order, "diagonal": diagonal}
        values = pruning.saliencies(model, F.cross_entropy, batches, **options)
        accuracies = [_pruned(model, share, batches, images, subject, options) for share in subject.sparsities]
        yield {
            "kind": "pruning",
            "network": name,
            "seed": seed,
            "saliency": label,
            "sparsities": [*subject.sparsities],
            "dense": accuracy(model, images.test),
            "one_shot": [one for one, _ in accuracies],
            "fine_tuned": [one for _, one in accuracies],
            "correlation": truth.correlation(values),
        }


def _pruned(
    model: nn.Module, share: float, batches: Batches, images: _Images, subject: Subject, options: dict[str, Any]
) -> tuple[float, float]:
    """The accuracies with this share of weights masked, before and after fine-tuning."""
    model = copy.deepcopy(model)
    pruning.prune(model, share, F.cross_entropy, batches, **options)
    one_shot = accuracy(model, images.test)
    train(model, images.epoch(-1)[: subject.steps])
    return one_shot, accuracy(model, images.test)


class _Images:
    """The images of a network; each seed has its own training images."""

    def __init__(self, subject: Subject, seed: int, data: Path | None) -> None:
        (images, labels), (held_out, answers) = images_of(subject.task, data)
        chosen = torch.randperm(len(labels), generator=generator_for(seed, "images"))[: subject.train]
        self._seed, self._flat, self._task = seed, subject.flat, subject.task
        self._x, self._y = self._seen(images[chosen]), labels[chosen]
        x, y = self._seen(held_out[: subject.test]), answers[: subject.test]
        self.test = [*zip(x.split(500), y.split(500), strict=True)]

    def _seen(self, images: Tensor) -> Tensor:
        x = self._task.prepare(images)
        return x.flatten(1) if self._flat else x

    def first(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Some of the training images, in batches of 100."""
        return [*zip(self._x[:count].split(100), self._y[:count].split(100), strict=True)]

    def epoch(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """All of them in a random order."""
        order = torch.randperm(len(self._y), generator=generator_for(self._seed, "order", number))
        return [(self._x[rows], self._y[rows]) for rows in order.split(_BATCH)]


def trained(subject: Subject, images: _Images, seed: int, path: Path) -> nn.Module:
    """The network of this seed: read from the file, or trained and written there."""

    def fit(model: nn.Module) -> None:
        for epoch in range(subject.epochs):
            train(model, images.epoch(epoch))

    return kept(path, subject.make(generator_for(seed, "network")), fit)


@dataclass(frozen=True)
class Removals:
    """The change of the loss when one weight becomes zero, for some weights of each parameter."""

    indices: Mapping[str, Tensor]  # into the flat parameter
    changes: Tensor  # one parameter after another

    def correlation(self, saliencies: Mapping[str, Tensor]) -> float:
        """Spearman's correlation of these saliencies with the changes."""
        predicted = torch.cat([saliencies[name].flatten()[index] for name, index in self.indices.items()])
        return spearman(predicted.double(), self.changes)


@torch.no_grad()
def removals(model: nn.Module, batches: Batches, *, count: int, generator: torch.Generator) -> Removals:
    """The true changes for ``count`` weights, drawn from all with equal chances."""
    exact = copy.deepcopy(model).double()
    x, y = torch.cat([x for x, _ in batches]).double(), torch.cat([y for _, y in batches])
    weights = {name: p for name, p in exact.named_parameters() if p.dim() > 1}
    sizes = torch.tensor([p.numel() for p in weights.values()])
    drawn = torch.randperm(int(sizes.sum()), generator=generator)[:count].sort().values
    ends = sizes.cumsum(0)
    indices = {
        name: drawn[(drawn >= end - size) & (drawn < end)] - (end - size)
        for name, size, end in zip(weights, sizes, ends, strict=True)
    }
    start, changes = F.cross_entropy(exact(x), y), []
    for name, index in indices.items():
        w = weights[name]
        for entry in zip(*(axis.tolist() for axis in torch.unravel_index(index, w.shape)), strict=True):
            kept = w[entry].clone()
            w[entry] = 0
            changes.append(F.cross_entropy(exact(x), y) - start)
            w[entry] = kept
    return Removals(indices, torch.stack(changes))


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks; equal values share their mean rank."""
    return float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, number, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[number]


_WAYS = {"one_shot": "one-shot", "fine_tuned": "fine-tuned"}


def _title(network: str) -> str:
    return SUBJECTS[network].title if network in SUBJECTS else network


def tables(config: Config, records: Records) -> Iterator[Table]:
    """Accuracies by saliency and sparsity, a table per network."""
    for network, some in by(records, "network").items():
        sparsities, rows = some[0]["sparsities"], []
        for name, own in by(some, "saliency").items():
            cells = [percent(estimate([r[way][n] for r in own])) for way in _WAYS for n in range(len(sparsities))]
            rows.append((name, *cells, plain(estimate([r["correlation"] for r in own]), digits=2)))
        seeds = by(some, "seed")
        dense = percent(estimate([own[0]["dense"] for own in seeds.values()]))
        yield Table(
            f"Test accuracy after pruning, in percent: {_title(network)}, {counted(len(seeds), 'seed')}",
            ("saliency", *(f"{share:.0%}, {words}" for words in _WAYS.values() for share in sparsities), "rank corr."),
            tuple(rows),
            f"Not pruned: {dense}. Means ± standard errors. Rank correlation: Spearman's, of the saliency with the "
            "true change of the loss when one weight is removed.",
        )


def rows(records: Records) -> Iterator[Record]:
    """Every accuracy: a row per network, saliency, seed, way and sparsity."""
    for record in sorted(records, key=lambda r: (r["network"], r["saliency"], r["seed"])):
        common = {key: record[key] for key in ("network", "saliency", "seed", "dense")}
        common["correlation"] = f"{record['correlation']:.4f}"
        for way, words in _WAYS.items():
            for share, value in zip(record["sparsities"], record[way], strict=True):
                yield {**common, "way": words, "sparsity": share, "accuracy": f"{value:.4f}"}


_CAPTION = (
    "Test accuracy against the share of weights removed, means over seeds with bars of ± 2 standard errors. Dotted: "
    "not pruned. Within a panel saliencies share networks and images; lines lie beside each other to be told apart."
)


def figures(config: Config, records: Records) -> Iterator[Plot]:
    """Accuracy against sparsity: a column per network, one-shot above, fine-tuned below, a line per saliency."""
    networks = [name for name in config["subjects"] if any(record["network"] == name for record in records)]
    if not networks:
        return
    figure = Figure(figsize=(4.0 * len(networks), 6.6), layout="constrained", dpi=150)
    panels = figure.subplots(2, len(networks), squeeze=False, sharex="col")
    for row, (way, words) in zip(panels, _WAYS.items(), strict=True):
        for axes, network in zip(row, networks, strict=True):
            _draw(axes, [record for record in records if record["network"] == network], way)
            if way == "one_shot":
                axes.set_title(verbatim(_title(network)), fontsize="small")
        row[0].set_ylabel(f"test accuracy, {words}")
    legend_of_all(figure, panels.flat, columns=4)
    for axes in panels[1]:
        axes.set_xlabel("weights removed")
    yield Plot("pruning", _CAPTION, figure)


def _draw(axes: Axes, records: Records, way: str) -> None:
    sparsities = records[0]["sparsities"]
    dense = estimate([record["dense"] for record in records]).mean
    axes.axhline(dense, color="#777777", linewidth=1, linestyle=":")
    for number, (name, saliency) in enumerate(SALIENCIES.items()):
        own = [record for record in records if record["saliency"] == name]
        if own:
            values = [estimate([record[way][n] for record in own]) for n in range(len(sparsities))]
            places = [n + 0.02 * (number - len(SALIENCIES) / 2) for n in range(len(sparsities))]
            draw_line(axes, places, values, color=saliency.color, marker=saliency.marker, label=name)
    axes.set_xticks(range(len(sparsities)), [f"{share:.0%}" for share in sparsities])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    tidy(axes)


def _are_shares(values: object) -> bool:
    return all(isinstance(value, float) and 0 <= value <= 1 for value in values)  # type: ignore[attr-defined]


_FIELDS = has(
    **dict.fromkeys(("network", "saliency"), is_word),
    **dict.fromkeys(("sparsities", "one_shot", "fine_tuned"), _are_shares),
    seed=is_whole,
    correlation=is_number,
    dense=lambda value: _are_shares([value]),
)


def is_record(record: Record) -> bool:
    """Whether the record has what tables and figures need."""
    return _FIELDS(record) and len({len(record[name]) for name in ("sparsities", *_WAYS)}) == 1


STUDY = Study(
    "which saliency prunes MLPs on MNIST and a CNN on CIFAR-10 best (25 minutes)",
    settings,
    cells,
    ("network", "seed"),
    measure,
    {"pruning": is_record},
    tables,
    rows,
    figures,
)
