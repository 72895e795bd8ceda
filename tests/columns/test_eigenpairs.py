"""Eigenpairs of diag q − qqᵀ against dense ones, at the corners where they are hard to get."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hesscale.columns.eigenpairs import leading_pairs
from hesscale.rules.probabilities import spread

from ..optim.small import random


def blocks(classes: int, *lead: float) -> Tensor:
    """Logits of zero but for the first few."""
    z = torch.zeros(3, classes, dtype=torch.float64)
    for place, value in enumerate(lead[:classes]):
        z[:, place] = value
    return z


def masked(classes: int, kept: int) -> Tensor:
    z = random(3, classes)
    z[:, kept:] = -torch.inf
    return z


LOGITS = {
    "usual": lambda classes: random(40, classes),
    "sharp": lambda classes: 8 * random(40, classes),
    "sharper": lambda classes: 25 * random(40, classes),
    "uniform": lambda classes: blocks(classes),
    "one-hot to rounding": lambda classes: blocks(classes, 20.0),
    "one-hot": lambda classes: blocks(classes, 200.0),
    "two that lead": lambda classes: blocks(classes, 30.0, 30.0),
    "two that almost lead": lambda classes: blocks(classes, 30.0, 30.0 - 1e-9),
    "equal ones and others": lambda classes: random(40, classes, seed=1).round(),
    "nearly equal": lambda classes: 1e-7 * random(40, classes),
    "one class": lambda classes: masked(classes, 1),
    "two classes": lambda classes: masked(classes, 2),
}


def dense(q: Tensor) -> Tensor:
    """diag q − qqᵀ in double precision; its diagonal from the others, since 1 − q keeps no digit of a leading q."""
    q = q.double()
    m = -q.unsqueeze(-1) * q.unsqueeze(-2)
    m.diagonal(dim1=-2, dim2=-1).zero_()
    m.diagonal(dim1=-2, dim2=-1).copy_(-m.sum(-1))
    return m


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [2, 3, 10, 50])
@pytest.mark.parametrize("kind", LOGITS)
def test_pairs_are_those_of_the_dense_matrix(kind: str, classes: int, dtype: torch.dtype) -> None:
    q = LOGITS[kind](classes).to(dtype).softmax(-1)
    m = dense(q)
    rank = min(4, classes - 1)
    found = torch.stack([u.clone() for u in leading_pairs(q, rank)], -1).double()
    tolerance = 5e-15 if dtype is torch.float64 else 5e-7
    size = m.diagonal(dim1=-2, dim2=-1).amax(-1)  # of each row: the largest entry bounds nothing else but rounding
    values = torch.linalg.eigvalsh(m).flip(-1)[:, :rank]
    assert ((found.square().sum(-2) - values).abs().amax(-1) <= tolerance * size * classes).all()
    products = found.mT @ found
    products.diagonal(dim1=-2, dim2=-1).zero_()
    assert (products.abs().amax((-1, -2)) <= tolerance * size * classes).all()
    residual = m @ found - found * found.square().sum(-2, keepdim=True)
    assert (residual.norm(dim=-2).amax(-1) <= tolerance * size**1.5 * classes).all()


@pytest.mark.parametrize("kind", LOGITS)
def test_what_is_left_of_the_diagonal_is_not_negative(kind: str) -> None:
    q = LOGITS[kind](10).float().softmax(-1)
    rest = spread(q, -1)
    size = rest.amax(-1)
    for u in leading_pairs(q, 3):
        rest -= u.square()
        assert (rest.amin(-1) >= -1e-6 * size).all()
    exact = dense(q).diagonal(dim1=-2, dim2=-1)
    assert (rest.double().sum(-1) <= exact.sum(-1) * (1 + 1e-6)).all()


def test_as_many_pairs_as_there_are() -> None:
    q = random(3, 4).softmax(-1)
    pairs = [u.clone() for u in leading_pairs(q, 10)]
    assert len(pairs) == 3  # the last eigenvalue is 0
    torch.testing.assert_close(sum(u.unsqueeze(-1) * u.unsqueeze(-2) for u in pairs), dense(q), rtol=1e-12, atol=1e-15)
    assert [*leading_pairs(torch.ones(3, 1), 2)] == []


MEMORY = """
import resource, torch, torch.nn.functional as F, hesscale

def added(classes):
    layer = torch.nn.Linear(2, classes)
    loss = F.cross_entropy(layer(3 * torch.randn(32, 2)), torch.randint(classes, (32,)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hesscale.backward(loss, rank=3)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

added(5_000)  # libraries allocate at their first use
print(added(50_000) * 1024 / (32 * 50_000 * 4))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_memory_of_a_large_vocabulary() -> None:
    """50,000 classes, batch of 32, rank 3: copies of the logits beyond what was there before."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) <= 6
