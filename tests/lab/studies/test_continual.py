"""The study of continual learning: what it counts, its tasks, and its command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hesscale.applications.consolidation import EWC
from hesscale_lab.studies import applications, continual
from hesscale_lab.tasks.networks import mlp

from ..small_archives import write_mnist

TINY = {
    "strengths": {name: [0.1, 1.0] for name in continual.BENCHMARKS},
    "seeds": [0, 1],
    "train": 6,
    "epochs": 1,
    "curvature": 6,
    "measured": 4,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    applications.images_of.cache_clear()
    write_mnist(tmp_path, 60)
    return tmp_path


def test_forgetting_is_counted_from_the_best() -> None:
    found = continual.Outcome(((0.9,), (0.95, 0.8), (0.5, 0.85, 0.7)))
    assert found.accuracy == pytest.approx((0.5 + 0.85 + 0.7) / 3)
    assert found.forgetting == pytest.approx((0.45 + 0.0) / 2)


def test_tasks_are_five_and_keep_their_images_apart(data: Path) -> None:
    split = continual.tasks_of("split MNIST", 0, TINY, data)
    (raw, labels), _ = applications.images_of(continual._MNIST, data)
    images = continual._MNIST.prepare(raw).flatten(1)
    for number, task in enumerate(split):
        for x, y in (task.train, task.valid):
            for image, label in zip(x, y, strict=True):
                (place,) = (images == image).all(1).nonzero().flatten().tolist()
                assert labels[place] == 2 * number + label
        assert not any((task.train[0] == image).all(1).any() for image in task.valid[0])
    permuted = continual.tasks_of("permuted MNIST", 0, TINY, data)
    sums = [task.train[0].sum(1) for task in permuted]
    assert all(torch.allclose(one, sums[0]) for one in sums)
    assert len({tuple(task.train[0][0].tolist()) for task in permuted}) == 5
    assert not torch.equal(continual.tasks_of("permuted MNIST", 1, TINY, data)[0].train[0], permuted[0].train[0])


def test_a_penalty_holds_weights_where_they_were(data: Path) -> None:
    first, second = continual.tasks_of("split MNIST", 0, TINY, data)[:2]
    moved = []
    for strength in (None, 100.0):
        torch.manual_seed(0)
        model = mlp(784, 10, 2, activation=nn.Tanh)
        penalty = None if strength is None else EWC(model, strength=strength)
        applications.train(model, continual.shuffled(first.train, 20, torch.Generator().manual_seed(0)), penalty)
        anchor = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        if penalty is not None:
            penalty.consolidate(diagonal={name: torch.ones_like(p) for name, p in model.named_parameters()})
        applications.train(model, continual.shuffled(second.train, 20, torch.Generator().manual_seed(0)), penalty)
        now = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        moved.append(float((now - anchor).norm()))
    assert 0 < moved[1] < moved[0] / 5
