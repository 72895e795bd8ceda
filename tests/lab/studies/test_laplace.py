"""The study of Laplace posteriors: its metrics against slow definitions, and its command at a tiny size."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hesscale_lab.cli import app
from hesscale_lab.studies import laplace
from hesscale_lab.studies.table import STUDIES
from hesscale_lab.wording import csv_text


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    inside, outside = draws(30).round(decimals=1), (draws(40, seed=1) - 0.5).round(decimals=1)  # with draws
    pairs = [(float(a > b) + 0.5 * float(a == b)) for a in inside for b in outside]
    assert laplace.auroc(inside, outside) == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)
    assert laplace.auroc(torch.ones(3), torch.zeros(2)) == 1.0


def test_calibration_error_by_its_definition() -> None:
    probabilities, answers = draws(200, 4).softmax(1), torch.arange(200) % 4
    confidence, choice = probabilities.max(1)
    total = 0.0
    for k in range(15):
        own = (confidence >= k / 15) & (confidence < (k + 1) / 15)
        if own.any():
            gap = confidence[own].mean() - (choice[own] == answers[own]).double().mean()
            total += float(own.double().mean() * gap.abs())
    assert laplace.calibration_error(probabilities, answers) == pytest.approx(total, rel=1e-9)


def test_sure_and_right_is_best() -> None:
    answers = torch.arange(10)
    sure, unsure = torch.eye(10), torch.full((10, 10), 0.1)
    found = laplace.judged([sure, unsure, unsure], answers)
    assert found == {"accuracy": 1.0, "nll": 0.0, "ece": 0.0, "turned": 1.0, "noise": 1.0}


def record(diagonal: str, seed: int, nll: float) -> dict[str, Any]:
    metrics = {"accuracy": 0.9, "nll": nll, "ece": 0.01, "turned": 0.8, "noise": 0.7, "clamped": 0.0}
    return {"kind": "laplace", "seed": seed, "diagonal": diagonal, "prior": "", "prediction": "", **metrics}


def test_table_and_file() -> None:
    records = [record("MAP", 0, 0.1), record("MAP", 1, 0.3)]
    assert all(laplace.STUDY.checks["laplace"](one) for one in records)
    (table,) = laplace.tables({}, records)
    assert table.rows == (("MAP", "90.0 ± 0.0", "0.200 ± 0.141", "1.0 ± 0.0", "80.0 ± 0.0", "70.0 ± 0.0"),)
    assert csv_text(laplace.rows(records)).splitlines()[1].startswith("MAP,,,2,0.9000,0.0000,0.2000,0.1414")
    assert not [*laplace.tables({}, [])]


def test_noise_is_images() -> None:
    found = laplace.blotches(50, torch.Generator().manual_seed(0))
    assert found.shape == (50, 28, 28)
    assert found.min() == 0
    assert found.max() <= 1
    assert 0.1 < found.mean() < 0.6


def test_the_command_measures_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On images that are made up: ten classes of blotches."""
    generator = torch.Generator().manual_seed(0)
    kinds = (255 * laplace.blotches(10, generator)).to(torch.uint8)

    def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(10, (count,), generator=generator)
        return kinds[labels].unsqueeze(1), labels

    made = images(300), images(100)
    monkeypatch.setattr(laplace, "_load", lambda data: made)
    sizes = {"trained": 200, "epochs": 2, "curvature": 40, "held_out": 20, "tested": 20}
    small = {**laplace.settings(quick=True), **sizes, "diagonals": ["HesScaleGN", "GGN"], "seeds": [0, 1]}
    study = STUDIES["laplace"]
    monkeypatch.setitem(STUDIES, "laplace", type(study)(**{**vars(study), "settings": lambda quick: small}))  # type: ignore[index]
    out = tmp_path / "run"
    arguments = ["study", "laplace", "--quick", "--out", str(out)]
    first = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert first.exit_code == 0, first.output
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (1 + 2 * 2 * 2)
    (out / "metrics.jsonl").write_text("\n".join(lines[:9]) + "\n")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == [*map(json.loads, lines)]
    assert "HesScaleGN, likeliest, linearized" in first.stdout
    assert json.loads((out / "config.json").read_text())["kind"] == "laplace"


@pytest.mark.filterwarnings("ignore")  # theirs
def test_diagonals_of_laplace_torch_are_ours() -> None:
    if importlib.util.find_spec("laplace") is None:
        pytest.skip("laplace-torch not installed: pip install 'hesscale[laplace]'")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    batches = [(draws(6, 4, seed=k).float(), torch.arange(6) % 3) for k in range(2)]
    found = laplace.diagonals()
    for ours, theirs in (("GGN", "laplace-torch GGN"), ("g² per example", "laplace-torch EF")):
        pair = [found[name](model, batches, torch.Generator()) for name in (ours, theirs)]
        for name, h in pair[0].items():
            torch.testing.assert_close(h, pair[1][name], rtol=1e-4, atol=1e-7)
    assert not any(module._backward_hooks or module._forward_hooks for module in model.modules())
