"""Does a network know what it does not know? Laplace posteriors of an MLP on MNIST, by kind of diagonal.

All diagonals are computed on the same part of the training images and stand for all of them. The prior of a posterior
has the largest marginal likelihood, or the smallest loss on held-out images. The network then sees test digits, the
same digits turned by a quarter, and blotches of noise: its confidence in the last two should be lower.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hesscale.applications.laplace import GRID, Posterior, laplace, probit
from hesscale.applications.over_batches import diagonal_over

from ..batches import generator_for
from ..tasks.networks import mlp
from ..tasks.table import TASKS
from ..wording import Table, counted
from .applications import DIAGONALS, Batches, Compute, images_of, kept, train
from .study import Cell, Config, Record, Records, Study, by, has, is_size, is_whole, is_word

TRAINED, EPOCHS, CURVATURE, HELD_OUT, TESTED, SAMPLES = 20_000, 20, 1000, 200, 500, 30
TRIED = GRID[::2]
"""Prior precisions for validation."""
MAP = "MAP"
PRIORS = ("likeliest", "validated")
PREDICTIONS = ("linearized", "sampled")
_BINS = 15  # of the calibration error

Metrics = dict[str, float]
K = TypeVar("K")


def _theirs(backend: str) -> Compute:
    """The diagonal that a backend of laplace-torch computes."""

    def compute(model: nn.Module, batches: Batches, generator: torch.Generator) -> Mapping[str, Tensor]:
        import laplace as package
        from laplace import curvature
        from torch.utils.data import DataLoader, TensorDataset

        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"subset_of_weights": "all", "hessian_structure": "diag", "backend": getattr(curvature, backend)}
            posterior = package.Laplace(copy.deepcopy(model), "classification", **options)  # it leaves hooks
            posterior.fit(DataLoader(TensorDataset(x, y), batch_size=50))
        parts = posterior.H.detach().split([p.numel() for p in model.parameters()])
        return {name: h.view_as(p) / len(y) for (name, p), h in zip(model.named_parameters(), parts, strict=True)}

    return compute


def diagonals() -> dict[str, Compute]:
    """The diagonals by name; those of laplace-torch where it is installed."""
    ours = {name: DIAGONALS[name] for name in ("HesScaleGN", "HesScale", "HesScale rank=3", "GGN-MC", "g² per example")}
    ours["GGN"] = lambda model, batches, generator: diagonal_over(model, F.cross_entropy, batches, method="ggn")
    theirs = {"laplace-torch GGN": _theirs("CurvlinopsGGN"), "laplace-torch EF": _theirs("BackPackEF")}
    return ours | theirs if importlib.util.find_spec("laplace") else ours


def settings(quick: bool) -> Config:
    """The content of config.json; quick: one seed, and a fifth of everything."""
    part = 5 if quick else 1
    return {
        "diagonals": [*diagonals()],
        "seeds": [*range(1 if quick else 5)],
        "trained": TRAINED // part,
        "epochs": EPOCHS,
        "curvature": CURVATURE // part,
        "held_out": HELD_OUT // part,
        "tested": TESTED // part,
    }


def cells(config: Config) -> list[Cell]:
    """Seeds."""
    return [(seed,) for seed in config["seeds"]]


def measure(cell: Cell, config: Config, *, data: Path | None, folder: Path) -> Iterator[Record]:
    """A record for each posterior and way to predict, and one for the network without a posterior."""
    (seed,) = cell
    (x, y), (held_x, held_y), tests, answers = _images(config, seed, data)
    model = _trained(x, y, config["epochs"], seed, folder / f"network-{seed}.pt")
    batches = [*zip(x[: config["curvature"]].split(100), y[: config["curvature"]].split(100), strict=True)]
    posteriors = _posteriors(model, batches, config, len(y), seed)
    tuned = _tuned(posteriors, held_x, held_y)
    for key, predicted in _predictions(model, tuned, tests, seed):
        metrics = {name: float(f"{value:.6g}") for name, value in judged(predicted, answers).items()}
        name, prior, way = key
        clamped = posteriors[name].clamped if name in posteriors else 0.0
        where = {"seed": seed, "diagonal": name, "prior": prior, "prediction": way, "clamped": clamped}
        yield {"kind": "laplace", **where, **metrics}


Pair = tuple[Tensor, Tensor]


def _images(config: Config, seed: int, data: Path | None) -> tuple[Pair, Pair, list[Tensor], Tensor]:
    """Training and held-out images with their labels; test digits, the same turned, and noise; the digits' labels."""
    task = TASKS["mnist-mlp"]
    (images, labels), (test, answers) = images_of(task, data)
    order = torch.randperm(len(labels), generator=generator_for(seed, "images"))
    used = (order[: config["trained"]], order[config["trained"] :][: config["held_out"]])
    training, held_out = ((task.prepare(images[rows]).flatten(1), labels[rows]) for rows in used)
    chosen = torch.randperm(len(answers), generator=generator_for(seed, "test"))[: config["tested"]]
    digits = task.prepare(test[chosen]).reshape(-1, 28, 28)
    noise = blotches(len(digits), generator_for(seed, "noise"))
    noise = digits.min() + noise * (digits.max() - digits.min())
    tests = [part.flatten(1).to(digits.dtype) for part in (digits, digits.rot90(1, (1, 2)), noise)]
    return training, held_out, tests, answers[chosen]


def blotches(count: int, generator: torch.Generator) -> Tensor:
    """Images [count, 28, 28] in [0, 1] of smooth noise, bright here and dark there as clothes are."""
    coarse = torch.rand(count, 1, 7, 7, generator=generator)
    smooth = F.interpolate(coarse, size=(28, 28), mode="bilinear")[:, 0]
    return ((smooth - 0.4) * 3).clamp(0, 1)


def _trained(x: Tensor, y: Tensor, epochs: int, seed: int, path: Path) -> nn.Sequential:
    """The network of this seed: read from the file, or trained with Adam and written there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_for(seed, "network").initial_seed())
        model = mlp(784, 128, 64, 10, activation=nn.ReLU)
    orders = (torch.randperm(len(y), generator=generator_for(seed, "order", epoch)) for epoch in range(epochs))
    batches = ((x[rows], y[rows]) for order in orders for rows in order.split(128))
    return kept(path, model, lambda model: train(model, batches))


def _posteriors(model: nn.Module, batches: Batches, config: Config, examples: int, seed: int) -> dict[str, Posterior]:
    known = diagonals()
    computed = {name: known[name](model, batches, generator_for(seed, "curvature")) for name in config["diagonals"]}
    return {name: laplace(model, diagonal=diagonal, examples=examples) for name, diagonal in computed.items()}


Key = tuple[str, str, str]
"""A diagonal, a prior, and a way to predict."""


def _tuned(posteriors: Mapping[str, Posterior], x: Tensor, y: Tensor) -> dict[tuple[str, str], Posterior]:
    """Each posterior with its likeliest prior, and with the prior that predicts held-out images best."""
    tuned = {(name, PRIORS[0]): posterior.with_likeliest_prior() for name, posterior in posteriors.items()}
    tried = {(name, tau): posterior.with_prior(tau) for name, posterior in posteriors.items() for tau in TRIED}
    loss = {key: float(F.nll_loss(p.clamp(min=1e-30).log(), y)) for key, p in _linearized(tried, x).items()}
    for name in posteriors:
        best = min(TRIED, key=lambda tau: loss[name, tau])
        tuned[name, PRIORS[1]] = tried[name, best]
    return tuned


def _linearized(posteriors: Mapping[K, Posterior], x: Tensor) -> dict[K, Tensor]:
    """The probabilities of each posterior, with Jacobians that are computed once for all."""
    variances = {key: posterior.variance for key, posterior in posteriors.items()}
    first = next(iter(posteriors.values()))
    stacked = {name: torch.stack([v[name].flatten() for v in variances.values()], 1) for name in first.mean}
    parts: list[Tensor] = []
    for f, jacobians in first.jacobians(x):
        spread = sum((js.square_() @ stacked[name] for name, js in jacobians.items()), torch.zeros(()))
        parts.append(torch.stack([probit(f, one) for one in spread.unbind(-1)]))
    return dict(zip(posteriors, torch.cat(parts, 1), strict=True))


def _predictions(
    model: nn.Module, tuned: Mapping[tuple[str, str], Posterior], tests: Sequence[Tensor], seed: int
) -> Iterator[tuple[Key, list[Tensor]]]:
    with torch.no_grad():
        yield (MAP, "", ""), [model(x).softmax(-1) for x in tests]
    linear = [_linearized(tuned, x) for x in tests]
    for (name, prior), posterior in tuned.items():
        yield (name, prior, PREDICTIONS[0]), [part[name, prior] for part in linear]
        generator = generator_for(seed, "samples")
        yield (
            (name, prior, PREDICTIONS[1]),
            [posterior.predict(x, samples=SAMPLES, generator=generator) for x in tests],
        )


def judged(predicted: Sequence[Tensor], answers: Tensor) -> Metrics:
    """The metrics of probabilities for digits, turned digits, and noise."""
    digits, turned, noise = predicted
    return {
        "accuracy": float((digits.argmax(1) == answers).double().mean()),
        "nll": float(F.nll_loss(digits.clamp(min=1e-30).log(), answers)),
        "ece": calibration_error(digits, answers),
        "turned": auroc(digits.amax(1), turned.amax(1)),
        "noise": auroc(digits.amax(1), noise.amax(1)),
    }


def calibration_error(probabilities: Tensor, answers: Tensor) -> float:
    """Σ over bins of confidence: the share of predictions in it · |mean confidence − accuracy|."""
    confidence, choice = probabilities.double().max(1)
    right = (choice == answers).double()
    bins = (confidence * _BINS).long().clamp(max=_BINS - 1)
    gap = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins, confidence - right)
    return float(gap.abs().sum() / len(answers))


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that a known input scores higher than an unknown one; equal scores count one half."""
    scores = torch.cat([inside, outside]).double()
    _, group, count = scores.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[group]
    wins = float(rank[: len(inside)].sum()) - len(inside) * (len(inside) + 1) / 2
    return wins / (len(inside) * len(outside))


def by_posterior(records: Records) -> dict[Key, list[Record]]:
    """The records of all seeds, by diagonal, prior and way to predict."""
    return by(records, "diagonal", "prior", "prediction")


_COLUMNS = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE %", "turned": "turned %", "noise": "noise %"}
_NOTE = (
    "Mean ± standard deviation over seeds. Turned, noise: the area under the ROC curve that tells test digits from "
    "digits turned by a quarter, and from noise, by confidence."
)


def tables(config: Config, records: Records) -> Iterator[Table]:
    """The metrics of each posterior."""
    if not records:
        return
    seeds = counted(len({record["seed"] for record in records}), "seed")
    cells = {", ".join(filter(None, key)): some for key, some in by_posterior(records).items()}
    rows = tuple((title, *(_cell(some, name) for name in _COLUMNS)) for title, some in cells.items())
    yield Table(f"Laplace posteriors of an MLP on MNIST, {seeds}", ("posterior", *_COLUMNS.values()), rows, _NOTE)


def _cell(records: Records, name: str) -> str:
    factor, digits = (1.0, 3) if name == "nll" else (100.0, 1)
    values = [factor * record[name] for record in records]
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def rows(records: Records) -> Iterator[Record]:
    """Means and standard deviations over seeds, by posterior and way to predict."""
    for (diagonal, prior, prediction), some in by_posterior(records).items():
        row = {"diagonal": diagonal, "prior": prior, "prediction": prediction, "seeds": len(some)}
        for name in (*_COLUMNS, "clamped"):
            values = [record[name] for record in some]
            row |= {name: f"{mean(values):.4f}", f"{name}_sd": f"{stdev(values) if len(values) > 1 else 0.0:.4f}"}
        yield row


STUDY = Study(
    "how well diagonals of several kinds tell a network on MNIST what it does not know (a quarter of an hour)",
    settings,
    cells,
    ("seed",),
    measure,
    {
        "laplace": has(
            seed=is_whole,
            **dict.fromkeys(("diagonal", "prior", "prediction"), is_word),
            **dict.fromkeys((*_COLUMNS, "clamped"), is_size),
        )
    },
    tables,
    rows,
)
