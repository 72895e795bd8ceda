"""The study of pruning: its diagonals and correlations against slow references, and its command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import hesscale
from hesscale_lab.cli import app
from hesscale_lab.studies import pruning
from hesscale_lab.studies.diagonals import DIAGONALS
from hesscale_lab.studies.table import STUDIES
from hesscale_lab.tasks.networks import mlp

from ..small_archives import write_cifar, write_mnist

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


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["study", "pruning", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command_measures_draws_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {name: dataclasses.replace(row, **TINY) for name, row in pruning.SUBJECTS.items() if name != "mlp-relu"}
    names = ("magnitude", "HesScale, −gw + ½hw²", "HesScale, h < 0 as 0", "exact")
    monkeypatch.setattr(pruning, "SUBJECTS", tiny)
    monkeypatch.setattr(pruning, "SALIENCIES", {name: pruning.SALIENCIES[name] for name in names})
    write_mnist(tmp_path, 50)
    write_cifar(tmp_path, 20, classes=10)
    pruning._load.cache_clear()
    measured: list[str] = []
    original = pruning.removals

    def interrupted(model: nn.Module, *more: object, **options: object) -> object:
        measured.append(type(model[0]).__name__)  # type: ignore[index]
        if len(measured) == 3:
            raise KeyboardInterrupt
        return original(model, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pruning, "removals", interrupted)
    out = tmp_path / "run"
    monkeypatch.setattr(pruning, "settings", lambda quick: {**settings(quick), "seeds": [0, 1]})
    settings = STUDIES["pruning"].settings
    row = dataclasses.replace(STUDIES["pruning"], settings=pruning.settings)
    monkeypatch.setitem(STUDIES, "pruning", row)  # type: ignore[arg-type]
    assert run("--data", tmp_path, "--out", out)[0] == 130
    code, printed, complaint = run("--data", tmp_path, "--out", out)
    assert (code, complaint.strip()) == (0, "")
    assert measured == ["Linear", "Linear", "Conv2d", "Conv2d", "Conv2d"]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(r["network"], r["seed"]) for r in records] == [
        *[("mlp-tanh", 0)] * 4,
        *[("mlp-tanh", 1)] * 4,
        *[("cnn", 0)] * 2,
        *[("cnn", 1)] * 2,
    ]
    assert all(name in printed for name in names)
    assert len((out / "pruning.csv").read_text().splitlines()) == 1 + 12 * 2 * 2
    assert (out / "pruning.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "config.json").read_text())["kind"] == "pruning"
    pruning._load.cache_clear()
