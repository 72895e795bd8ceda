"""What prunes best: accuracy against sparsity by saliency, and how each saliency ranks the true changes of the loss.

Networks are trained once per seed and kept in the run's folder. Saliencies come from a part of the training images; the
true change is that of the mean loss on the same images, in float64, when one weight is zero, for some drawn at random.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hesscale.applications import pruning

from .. import checkpoints
from ..batches import generator_for
from ..tasks.networks import mlp
from ..tasks.table import TASKS, Task
from .diagonals import DIAGONALS, Batches, Diagonal
from .reading import Record

_BATCH = 128
_LR = 1e-3  # of Adam, in training and in fine-tuning


@dataclass(frozen=True)
class Subject:
    """A network to prune, and how much of everything is done with it."""

    title: str
    task: Task
    make: Callable[[torch.Generator], nn.Module]
    flat: bool  # images as vectors
    train: int  # images
    epochs: int
    curvature: int  # images for saliencies
    test: int
    removed: int  # weights whose removal is tried
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
    """A diagonal and what is made of it."""

    diagonal: str  # a name in DIAGONALS
    order: pruning.Order = "obd"
    clamped: bool = False  # negative entries as 0: such weights go first
    subjects: tuple[str, ...] = ("mlp-relu", "mlp-tanh", "cnn")


SALIENCIES: Mapping[str, Saliency] = {
    "magnitude": Saliency("ones"),
    "g² per example": Saliency("g² per example"),
    "HesScaleGN": Saliency("HesScaleGN"),
    "HesScale": Saliency("HesScale"),
    "HesScale, h < 0 as 0": Saliency("HesScale", clamped=True, subjects=("mlp-tanh",)),
    "HesScale, −gw + ½hw²": Saliency("HesScale", "second"),
    "HesScale rank=1": Saliency("HesScale rank=1"),
    "HesScale rank=3": Saliency("HesScale rank=3"),
    "GGN-MC": Saliency("GGN-MC"),
    "exact": Saliency("exact", subjects=("mlp-relu", "mlp-tanh")),
}
_COUNTS = ("train", "epochs", "curvature", "test", "removed", "steps")


def settings(quick: bool) -> dict[str, Any]:
    """What config.json says; quick: one seed, and MLPs only."""
    subjects = ["mlp-relu", "mlp-tanh"] if quick else [*SUBJECTS]
    return {
        "subjects": subjects,
        "sizes": {name: {count: getattr(SUBJECTS[name], count) for count in _COUNTS} for name in subjects},
        "saliencies": [*SALIENCIES],
        "sparsities": {name: [*SUBJECTS[name].sparsities] for name in subjects},
        "seeds": [*range(1 if quick else 5)],
    }


def cells(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Network and seed, those of MLPs first: they take seconds."""
    small = [name for name in config["subjects"] if SUBJECTS[name].flat]
    large = [name for name in config["subjects"] if name not in small]
    return [(name, seed) for some in (small, large) for seed in config["seeds"] for name in some]


def measure_cell(
    cell: tuple[Any, ...], config: Mapping[str, Any], *, data: Path | None, folder: Path
) -> Iterator[dict[str, Any]]:
    """One record per saliency: accuracies by sparsity, one-shot and fine-tuned, and the rank correlation."""
    name, seed = cell
    subject = SUBJECTS[name]
    images = _Images(subject, seed, data)
    model = trained(subject, images, seed, folder / f"{name}-{seed}.pt")
    batches = images.first(subject.curvature)
    truth = removals(model, batches, count=subject.removed, generator=generator_for(seed, "removed"))
    find = functools.cache(lambda key: DIAGONALS[key](model, batches, generator_for(seed, "curvature")))
    for label in config["saliencies"]:
        saliency = SALIENCIES[label]
        if name not in saliency.subjects:
            continue
        how: dict[str, Any] = {"order": saliency.order, "diagonal": _used(saliency, find(saliency.diagonal))}
        found = pruning.saliencies(model, F.cross_entropy, batches, **how)
        accuracies = [_pruned(model, share, batches, images, subject, how) for share in subject.sparsities]
        yield {
            "kind": "pruning",
            "network": name,
            "seed": seed,
            "saliency": label,
            "sparsities": [*subject.sparsities],
            "dense": accuracy(model, images.test),
            "one_shot": [one for one, _ in accuracies],
            "fine_tuned": [one for _, one in accuracies],
            "correlation": truth.correlation(found),
        }


def _used(saliency: Saliency, found: Diagonal) -> Diagonal:
    return {name: h.clamp(min=0) for name, h in found.items()} if saliency.clamped else found


def _pruned(
    model: nn.Module, share: float, batches: Batches, images: _Images, subject: Subject, how: dict[str, Any]
) -> tuple[float, float]:
    """The accuracies with so many weights masked, before and after fine-tuning."""
    model = copy.deepcopy(model)
    pruning.prune(model, share, F.cross_entropy, batches, **how)
    one_shot = accuracy(model, images.test)
    train(model, images.epoch(-1)[: subject.steps])
    return one_shot, accuracy(model, images.test)


@functools.lru_cache(maxsize=1)
def _load(task: Task, data: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return task.load(data)


class _Images:
    """What a network is trained, measured and tested on; seeds have other training images each."""

    def __init__(self, subject: Subject, seed: int, data: Path | None) -> None:
        (images, labels), (held_out, answers) = _load(subject.task, data)
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
        return [(self._x[places], self._y[places]) for places in order.split(_BATCH)]


def trained(subject: Subject, images: _Images, seed: int, path: Path) -> nn.Module:
    """The network of this seed: read from the file, or trained and written there."""
    model = subject.make(generator_for(seed, "network"))
    state = checkpoints.load(path)
    if state is not None:
        model.load_state_dict(state)
        return model
    for epoch in range(subject.epochs):
        train(model, images.epoch(epoch))
    checkpoints.save(path, model.state_dict())
    return model


def train(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Trains in place with Adam, once through the batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=_LR)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    """The share of right answers."""
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return right / sum(len(y) for _, y in batches)


@dataclass(frozen=True)
class Removals:
    """By how much the loss changes when a weight is zero, for some weights of each parameter."""

    places: Mapping[str, Tensor]  # among the entries of a parameter
    changes: Tensor  # of all places, one parameter after another

    def correlation(self, saliencies: Mapping[str, Tensor]) -> float:
        """Spearman's, of these saliencies with the changes."""
        predicted = torch.cat([saliencies[name].flatten()[own] for name, own in self.places.items()])
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
    places = {
        name: drawn[(drawn >= end - size) & (drawn < end)] - (end - size)
        for name, size, end in zip(weights, sizes, ends, strict=True)
    }
    start, changes = F.cross_entropy(exact(x), y), []
    for name, own in places.items():
        w = weights[name]
        for place in zip(*(index.tolist() for index in torch.unravel_index(own, w.shape)), strict=True):
            kept = w[place].clone()
            w[place] = 0
            changes.append(F.cross_entropy(exact(x), y) - start)
            w[place] = kept
    return Removals(places, torch.stack(changes))


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks, of which equal values share the mean."""
    return float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, number, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[number]


def is_record(record: Record) -> bool:
    """Whether a record has what tables and figures need."""
    lists = [record[key] for key in ("one_shot", "fine_tuned")]
    numbers = [record["dense"], *lists[0], *lists[1]]
    return (
        all(isinstance(record[key], str) for key in ("network", "saliency"))
        and {len(record["sparsities"])} == {*map(len, lists)}
        and isinstance(record["seed"], int)
        and all(isinstance(value, float) and 0 <= value <= 1 for value in numbers)
        and isinstance(record["correlation"], float)
    )
