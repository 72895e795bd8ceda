"""The study of pruning: its diagonals and correlations against slow references, and its command."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscale
from hesscale_lab.studies import pruning
from hesscale_lab.studies.applications import DIAGONALS
from hesscale_lab.tasks.networks import mlp

TINY = {"train": 40, "epochs": 1, "curvature": 20, "test": 40, "removed": 6, "steps": 1, "sparsities": (0.5, 0.9)}


def problem():
    torch.manual_seed(0)
    model = mlp(5, 6, 4, 3, activation=nn.Tanh).double()
    return model, [(torch.randn(n, 5).double(), torch.randint(3, (n,))) for n in (60, 7)]


def test_diagonals_are_what_they_are_called() -> None:
    model, batches = problem()
    generator = torch.Generator().manual_seed(0)
    single = [(x[n : n + 1], y[n : n + 1]) for x, y in batches for n in range(len(y))]
    wanted = {
        "exact": hesscale.estimate_over("hessian", model, F.cross_entropy, batches),
        "g² per example": hesscale.estimate_over("squared_gradient", model, F.cross_entropy, single),
        "HesScale rank=3": hesscale.estimate_over("hesscale", model, F.cross_entropy, batches, rank=3),
    }
    for name, expected in wanted.items():
        found = DIAGONALS[name](model, batches, generator)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-14)


def test_removals_are_true_and_leave_the_model_alone() -> None:
    model, batches = problem()
    before = [p.detach().clone() for p in model.parameters()]
    found = pruning.removals(model, batches, count=20, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    changes = []
    for name, own in found.indices.items():
        for place in own.tolist():
            changed = {key: p.detach().clone() for key, p in model.named_parameters()}
            changed[name].view(-1)[place] = 0
            outputs = torch.func.functional_call(model, changed, x)
            changes.append(F.cross_entropy(outputs, y) - F.cross_entropy(model(x), y))
    assert len(changes) == 20
    torch.testing.assert_close(found.changes, torch.stack(changes).detach(), rtol=1e-9, atol=1e-14)


def test_spearman_is_the_correlation_of_ranks() -> None:
    a = torch.tensor([1.0, 2.0, 2.0, 9.0]).double()
    assert pruning.spearman(a, a.exp()) == pytest.approx(1)
    assert pruning.spearman(a, -a) == pytest.approx(-1)
    # ranks 1, 2.5, 2.5, 4 against 2, 1, 3, 4: covariance 3, variances 4.5 and 5
    assert pruning.spearman(a, torch.tensor([5.0, 4.0, 6.0, 7.0]).double()) == pytest.approx(3 / 22.5**0.5)
