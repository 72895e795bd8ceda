"""Figure 1's study: its numbers at a size that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hesscale_lab.studies import quality, quality_time
from hesscale_lab.studies.quality import AS_CODED, authors_seeds, layers_of, summarize
from hesscale_lab.studies.quality_time import RANKS
from hesscale_lab.studies.study import REFERENCE, ZERO
from hesscale_lab.tasks.networks import NETWORKS, Network, Size, mlp, noise, seeded, sources, train

PAPER = NETWORKS["paper"]
TINY = Network("tiny", lambda: mlp(6, 3, 10, activation=nn.Tanh), Size(1, 1, 0), Size(1, 1, 0), noise)


@pytest.fixture(autouse=True)
def tiny_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, "tiny", TINY)  # type: ignore[arg-type]


def measured(network: str, seed: int, *, kind: str = "quality", **sizes: int) -> list[dict[str, Any]]:
    config = {"network": network, "seeds": [seed], "examples": 2, "updates": 0, "rounds": 1, **sizes}
    return list(quality.measure((kind, seed), config, data=None, folder=Path()))  # type: ignore[arg-type]


def test_seeds_are_the_authors() -> None:
    assert authors_seeds(3) == [64050, 9097, 32056]  # random.seed(54321); random.sample(range(99999), 40)
    assert authors_seeds(40)[-1] == 4300


def test_hesscale_is_nearest_and_the_order_is_that_of_the_paper() -> None:
    records = [record for seed in authors_seeds(3) for record in measured("paper", seed, examples=60)]
    lines = {line.method: line for line in summarize(records, "initial")}
    relative = {method: line.relative for method, line in lines.items()}
    assert list(lines)[:4] == [*reversed(RANKS), REFERENCE]  # every column takes some of the error away
    assert relative[REFERENCE] == 1
    assert 5 < relative["BL89"] < 12 < relative["GGN"] < relative["GGN-MC50"] < relative[ZERO]
    assert relative["HesScaleGN"] == pytest.approx(relative["GGN"], rel=0.05)
    assert relative["KFAC-MC50"] == pytest.approx(relative["GGN-MC50"], rel=0.05)
    assert relative["GGN-MC1"] == pytest.approx(relative["g²"], rel=0.1)
    assert relative["AdaHessian-MC50"] > 3 * relative[f"AdaHessian-MC50{AS_CODED}"]
    assert relative["AdaHessian-MC1"] / relative["AdaHessian-MC50"] == pytest.approx(50**0.5, rel=0.15)


def test_the_last_layer_is_exact_for_those_that_say_so() -> None:
    lines = {line.method: line.by_layer for line in summarize(measured("paper", 1), "initial")}
    for method in (REFERENCE, "HesScale rank=1", "HesScale rank=3", "HesScaleGN", "GGN"):
        assert lines[method][-1] < 1e-12
        assert min(lines[method][:-1]) > 1e-3
    first, *others = lines["HesScale rank=full"]  # f'' enters a diagonal, and is exact for one layer more
    assert first > 1e-3
    assert max(others) < 1e-12
    assert lines["BL89"][-1] > 0.1


def test_same_seeds_give_same_numbers_and_leave_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    assert measured("tiny", 7) == measured("tiny", 7)
    assert torch.equal(before, torch.random.get_rng_state())


def test_trained_networks_are_measured_before_and_after() -> None:
    before, after = measured("tiny", 0, updates=3)
    assert (before["stage"], after["stage"]) == ("initial", "trained")
    assert before["errors"] != after["errors"]
    assert summarize([before, after], "trained")[0].relative_by_seed


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_other_networks_go_through_the_library(name: str) -> None:
    network = NETWORKS[name]
    (record,) = measured(name, 0, examples=1)
    lines = [line.method for line in summarize([record], "initial")]
    assert lines[:4] == [*reversed(RANKS), REFERENCE]
    assert ("KFAC-MC1" in record["errors"]) == (name == "cnn")
    assert record["layers"] == layers_of(seeded(network.make, 0))


def test_layers_are_what_a_reader_would_call_one() -> None:
    assert layers_of(NETWORKS["transformer"].make()) == ["token", "place", "blocks.0", "blocks.1", "norm", "head"]
    assert layers_of(PAPER.make()) == ["0", "2", "4", "6"]


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_synthetic_tasks_can_be_learned(name: str) -> None:
    network = NETWORKS[name]
    data, _ = sources(network, None)
    model, draws = seeded(network.make, 0), torch.Generator().manual_seed(0)
    x, y = data(200, draws)
    before = nn.functional.cross_entropy(model(x), y)
    train(model, data, updates=150, generator=draws)
    assert nn.functional.cross_entropy(model(x), y) < 0.95 * before


def test_as_many_samples_as_fit_are_read_off_the_measured_times() -> None:
    seconds = {("GGN-MC", count): second for count, second in ((1, 3.0), (4, 4.5), (16, 6.5), (64, 16.1))}
    assert quality_time.time_of(seconds, "GGN-MC", 3) == pytest.approx(4.0)
    assert quality_time.time_of(seconds, "GGN-MC", 64) == pytest.approx(16.1)
    assert quality_time.affordable(seconds, "GGN-MC", 4.1) == 3
    assert quality_time.affordable(seconds, "GGN-MC", 17.2) == 69
    assert quality_time.affordable(seconds, "GGN-MC", 1.0) == 1


def test_error_per_time_gives_every_method_a_row() -> None:
    records = measured("tiny", 0, kind="time")
    for batch in quality_time.BATCH_SIZES:
        cell = {record["method"]: record for record in records if record["batch"] == batch}
        assert set(cell) == {*quality_time.SINGLE, *quality_time.SAMPLED, *quality_time.BOUNDS}
        assert cell["HesScale rank=full"]["error"] < cell["HesScale"]["error"] < cell["|diag H|"]["error"]
        assert all(record["seconds"] > 0 for record in cell.values() if record["seconds"] is not None)
