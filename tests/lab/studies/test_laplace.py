"""The study of Laplace posteriors: its metrics against slow definitions, and its command at a tiny size."""

import importlib.util
from typing import Any

import pytest
import torch

from hesscale_lab.studies import laplace
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
