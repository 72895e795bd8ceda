"""The study of stability: its networks, its optimizers, what it counts, and its command."""

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hesscale
from hesscale_lab.studies import stability
from hesscale_lab.tasks.small_networks import CLASSES, DATA, SMALL_NETWORKS
from hesscale_lab.wording import csv_text

NETWORK = "MLP 2×32, ReLU"


def test_there_are_sixty_networks_that_pass_shapes_on() -> None:
    assert len(SMALL_NETWORKS) >= 60
    for network in SMALL_NETWORKS.values():
        x, y = network.batch(3, "learnable", torch.Generator().manual_seed(0))
        assert network.make()(x).shape == (3, CLASSES)
        assert y.shape == (3,)


@pytest.mark.parametrize("data", DATA)
def test_labels_are_learnable_or_random(data: str) -> None:
    """The same inputs get the same labels, or other ones each time."""
    network = SMALL_NETWORKS[NETWORK]
    draws = [network.batch(200, data, torch.Generator().manual_seed(0)) for _ in range(2)]
    assert torch.equal(draws[0][1], draws[1][1])
    x, y = draws[0]
    fitted = torch.linalg.lstsq(x, F.one_hot(y, CLASSES).float()).solution
    accuracy = ((x @ fitted).argmax(1) == y).float().mean()
    assert (accuracy > 0.7) == (data == "learnable")


def test_sophia_is_sophias_formula() -> None:
    """θ ← θ − lr · clip(m / max(γh, ε), 1), here with bias correction of both averages."""
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer: Any = stability.METHODS["Sophia-G"]([p], 1e-3)
    g, h = torch.tensor([1.0, -2.0, 1e-3, -1e-3]).double(), torch.tensor([0.1, 3.0, 1.0, 2.0]).double()
    p.grad, p.curvature = g.clone(), h.clone()  # type: ignore[attr-defined]
    optimizer.step()
    torch.testing.assert_close(p.detach(), -1e-3 * (g / (0.05 * h)).clamp(-1, 1), rtol=1e-9, atol=1e-15)


def test_a_measurement_is_the_same_each_time_and_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    found = [
        [*stability.measure_network(NETWORK, SMALL_NETWORKS[NETWORK], batch=8, data=data)]
        for data in ("random", "random")
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert found[0] == found[1]
    assert len(found[0]) == len(stability.METHODS) * len(stability.RATES)
    assert all(stability.STUDY.checks["stability"](json.loads(json.dumps(record))) for record in found[0])
    ends = {(record["optimizer"], record["lr"]): record["end"] for record in found[0]}
    assert ends["AdaHesScale, paper", 1e-2] is None  # what the bound is for
    assert ends["AdaHesScale, bound 1", 1e-2] < 0.1


def record(optimizer: str, end: float | None, top: float | None = 2.0, **others: Any) -> dict[str, Any]:
    usual = {"kind": "stability", "network": "a", "batch": 2, "data": "random", "lr": 1e-3, "start": 2.0}
    return {**usual, "optimizer": optimizer, "end": end, "top": top, **others}


def test_shares_are_counted() -> None:
    records = [record("A", 1.0), record("A", 2.5, 2.6), record("A", None, None), record("A", 1.0, 3.6)]
    found = stability.share(records)
    assert (found.runs, found.worse, found.broken, found.spiked) == (4, 0.5, 0.25, 0.5)
    (table,) = stability.tables({}, [*records, record("B", 1.0, lr=1e-2)])
    assert table.headings == ("optimizer", "lr 0.001", "lr 0.01", "all", "not finite", "spiked")
    assert table.rows == (
        ("A", "50.0", "", "50.0", "25.0", "50.0"),
        ("B", "", "0.0", "0.0", "0.0", "0.0"),
    )
    assert csv_text(stability.rows(records)).splitlines()[1] == "A,0.001,2,random,4,0.5000,0.2500,0.5000"


def test_other_errors_than_numbers_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(stability, "_step", broken)
    with pytest.raises(RuntimeError, match="do not fit"):
        next(stability.measure_network(NETWORK, SMALL_NETWORKS[NETWORK], batch=2, data="random"))


def test_a_loss_that_is_not_finite_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "_step", lambda *_: math.nan)
    found = next(stability.measure_network(NETWORK, SMALL_NETWORKS[NETWORK], batch=2, data="random"))
    assert (found["end"], found["top"]) == (None, None)


def test_the_default_is_the_bound_of_the_study() -> None:
    (group,) = hesscale.AdaHesScale([torch.nn.Parameter(torch.ones(1))]).param_groups
    assert group["bound"] in stability.BOUNDS
