"""Does a diagonal tell a network what it does not know? Laplace posteriors of an MLP on MNIST, by kind of diagonal.

All diagonals are of the same part of the training images, and stand for all of them. A posterior has the prior of the
largest marginal likelihood, or of the smallest loss on images apart. It is asked about test digits, about the same
digits turned by a quarter, and about blotches of noise: of the last two it should be less sure.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hesscale.applications.laplace import GRID, Posterior, laplace, probit
from hesscale.applications.over_batches import diagonal_over

from .. import checkpoints
from ..batches import generator_for
from ..tasks.networks import mlp
from ..tasks.table import TASKS
from .diagonals import DIAGONALS, Batches, Find
from .reading import Record, by, is_size

TRAINED, EPOCHS, CURVATURE, HELD_OUT, TESTED, SAMPLES = 20_000, 20, 1000, 200, 500, 30
TRIED = GRID[::2]
"""Prior precisions for validation."""
MAP = "MAP"
PRIORS = ("likeliest", "validated")
PREDICTIONS = ("linearized", "sampled")
_BINS = 15  # of the calibration error

Metrics = dict[str, float]


def _theirs(backend: str) -> Find:
    """A diagonal of laplace-torch, by the name of its backend."""

    def find(model: nn.Module, batches: Batches, generator: torch.Generator) -> Mapping[str, Tensor]:
        import laplace as package
        from laplace import curvature
        from torch.utils.data import DataLoader, TensorDataset

        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"subset_of_weights": "all", "hessian_structure": "diag", "backend": getattr(curvature, backend)}
            found = package.Laplace(copy.deepcopy(model), "classification", **options)  # it leaves hooks
            found.fit(DataLoader(TensorDataset(x, y), batch_size=50))
        parts = found.H.detach().split([p.numel() for p in model.parameters()])
        return {name: h.view_as(p) / len(y) for (name, p), h in zip(model.named_parameters(), parts, strict=True)}

    return find


def diagonals() -> dict[str, Find]:
    """All that take part, by name; those of laplace-torch where it is installed."""
    ours = {name: DIAGONALS[name] for name in ("HesScaleGN", "HesScale", "HesScale rank=3", "GGN-MC", "g² per example")}
    ours["GGN"] = lambda model, batches, generator: diagonal_over(model, F.cross_entropy, batches, method="ggn")
    there = importlib.util.find_spec("laplace") is not None
    theirs = {"laplace-torch GGN": _theirs("CurvlinopsGGN"), "laplace-torch EF": _theirs("BackPackEF")}
    return ours | theirs if there else ours


def settings(quick: bool) -> dict[str, Any]:
    """What config.json says; quick: one seed, and a fifth of everything."""
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


def cells(config: Mapping[str, Any]) -> list[tuple[int]]:
    """Seeds."""
    return [(seed,) for seed in config["seeds"]]


def measure_cell(
    cell: tuple[Any, ...], config: Mapping[str, Any], *, data: Path | None, folder: Path
) -> Iterator[dict[str, Any]]:
    """One record per posterior and way to predict, and one of the network without any."""
    (seed,) = cell
    (x, y), (held_x, held_y), tests, answers = _images(config, seed, data)
    model = _trained(x, y, config["epochs"], seed, folder / f"network-{seed}.pt")
    batches = [*zip(x[: config["curvature"]].split(100), y[: config["curvature"]].split(100), strict=True)]
    found = _posteriors(model, batches, config, len(y), seed)
    tuned = _tuned(found, held_x, held_y)
    for key, predicted in _predictions(model, tuned, tests, seed):
        metrics = {name: float(f"{value:.6g}") for name, value in judged(predicted, answers).items()}
        name, prior, way = key
        clamped = found[name].clamped if name in found else 0.0
        where = {"seed": seed, "diagonal": name, "prior": prior, "prediction": way, "clamped": clamped}
        yield {"kind": "laplace", **where, **metrics}


Pair = tuple[Tensor, Tensor]


@functools.lru_cache(maxsize=1)
def _load(data: Path | None) -> tuple[Pair, Pair]:
    return TASKS["mnist-mlp"].load(data)


def _images(config: Mapping[str, Any], seed: int, data: Path | None) -> tuple[Pair, Pair, list[Tensor], Tensor]:
    """Training and held-out images with their labels; test digits, the same turned, and noise; the digits' labels."""
    (images, labels), (test, answers) = _load(data)
    prepare = TASKS["mnist-mlp"].prepare
    order = torch.randperm(len(labels), generator=generator_for(seed, "images"))
    used = (order[: config["trained"]], order[config["trained"] :][: config["held_out"]])
    train, held_out = ((prepare(images[own]).flatten(1), labels[own]) for own in used)
    chosen = torch.randperm(len(answers), generator=generator_for(seed, "test"))[: config["tested"]]
    digits = prepare(test[chosen]).reshape(-1, 28, 28)
    noise = blotches(len(digits), generator_for(seed, "noise"))
    noise = digits.min() + noise * (digits.max() - digits.min())
    tests = [part.flatten(1).to(digits.dtype) for part in (digits, digits.rot90(1, (1, 2)), noise)]
    return train, held_out, tests, answers[chosen]


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
    state = checkpoints.load(path)
    if state is not None:
        model.load_state_dict(state)
        return model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for own in torch.randperm(len(y), generator=generator_for(seed, "order", epoch)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(x[own]), y[own]).backward()
            optimizer.step()
    checkpoints.save(path, model.state_dict())
    return model


def _posteriors(
    model: nn.Module, batches: Batches, config: Mapping[str, Any], examples: int, seed: int
) -> dict[str, Posterior]:
    known = diagonals()
    found = {name: known[name](model, batches, generator_for(seed, "curvature")) for name in config["diagonals"]}
    return {name: laplace(model, diagonal=diagonal, examples=examples) for name, diagonal in found.items()}


Key = tuple[str, str, str]
"""A diagonal, a prior, and a way to predict."""


def _tuned(found: Mapping[str, Posterior], x: Tensor, y: Tensor) -> dict[tuple[str, str], Posterior]:
    """Each with its likeliest prior, and with that of the grid which predicts held-out images best."""
    tuned = {(name, PRIORS[0]): posterior.with_likeliest_prior() for name, posterior in found.items()}
    tried = {(name, tau): posterior.with_prior(tau) for name, posterior in found.items() for tau in TRIED}
    loss = {key: float(F.nll_loss(p.clamp(min=1e-30).log(), y)) for key, p in _linearized(tried, x).items()}
    for name in found:
        best = min(TRIED, key=lambda tau: loss[name, tau])
        tuned[name, PRIORS[1]] = tried[name, best]
    return tuned


def _linearized(posteriors: Mapping[Any, Posterior], x: Tensor) -> dict[Any, Tensor]:
    """The probabilities by each posterior, from Jacobians that are computed once for all of them."""
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
    """What is reported of probabilities for digits, digits turned, and noise."""
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
    place = (confidence * _BINS).long().clamp(max=_BINS - 1)
    gap = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, place, confidence - right)
    return float(gap.abs().sum() / len(answers))


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that something known gets a larger score than something unknown; a draw is half a win."""
    scores = torch.cat([inside, outside]).double()
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[place]
    wins = float(rank[: len(inside)].sum()) - len(inside) * (len(inside) + 1) / 2
    return wins / (len(inside) * len(outside))


_MEASURED = ("accuracy", "nll", "ece", "turned", "noise", "clamped")


def is_record(record: Record) -> bool:
    """Whether a record has what the table needs."""
    return (
        isinstance(record["seed"], int)
        and all(isinstance(record[key], str) for key in ("diagonal", "prior", "prediction"))
        and all(is_size(record[key]) for key in _MEASURED)
    )


def by_posterior(records: Sequence[Record]) -> dict[Key, list[Record]]:
    """The records of all seeds, by diagonal, prior and way to predict."""
    return by(records, "diagonal", "prior", "prediction")
