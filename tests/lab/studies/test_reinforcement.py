"""The study of reinforcement learning: what it counts, its tables and its figure, and that it goes on."""

import math
from typing import Any

import pytest

from hesscale_lab.studies import reinforcement
from hesscale_lab.wording import csv_text


def record(optimizer: str, curve: list[float | None], **others: Any) -> dict[str, Any]:
    usual = {"kind": "reinforcement", "environment": "CartPole", "algorithm": "PPO", "first": 0, "seed": 0}
    return {**usual, "optimizer": optimizer, "lr": 1e-3, "finite": True, "curve": curve, **others}


UP = [22.0] * 5 + [100.0, 200.0, 300.0, 400.0, 475.0]
DOWN = [*UP[::-1]]
FLAT = [22.0] * 10


def test_gains_are_on_one_scale() -> None:
    found = reinforcement.gains(record("A", [22.0, None, 475.0, *[None] * 7]))
    assert found == [0.0, 0.0, *[1.0] * 8]
    pendulum = record("A", [-1230.0, -200.0, *[-715.0] * 8], environment="Pendulum")
    assert reinforcement.gains(pendulum) == pytest.approx([0.0, 1.0, *[0.5] * 8])


def test_what_counts_as_a_collapse() -> None:
    """To have learnt and lost it, or not to be finite; what never learnt has nothing to lose."""
    found = reinforcement.outcome(
        [record("A", UP), record("A", DOWN), record("A", FLAT), record("A", UP, finite=False)]
    )
    assert (found.runs, found.collapsed, found.broken) == (4, 0.5, 0.25)
    assert found.mean == pytest.approx((475 + 22 + 22 + 475) / 4)
    assert found.gain == pytest.approx(0.5)
    assert found.error == pytest.approx(453 * math.sqrt(1 / 3) / 2)


def test_tables_and_file() -> None:
    records = [record("A", UP), record("A", FLAT, lr=1e-2), record("B", DOWN)]
    summary, grid = reinforcement.tables({"steps": 1000}, records)
    assert summary.rows == (
        ("A", "475", "0", "0.001", "1 of 2", "0.50", "0", "0"),
        ("B", "22", "0", "0.001", "0 of 1", "0.00", "100", "0"),
    )
    assert grid.headings == ("optimizer", "0.001", "0.01")
    assert grid.rows == (("A", "475 (0)", "22 (0)"), ("B", "22 (100)", ""))
    lines = csv_text(reinforcement.rows(records)).splitlines()
    assert lines[1] == "CartPole,PPO,A,0.001,1,475.0,0.0,1.000,0.00,0.00"
    assert len(lines) == 4


def test_the_figure_has_a_panel_for_each_problem() -> None:
    records = [record("Adam", UP), record("AdaHesScale, paper", UP, algorithm="A2C"), record("AdaHesScale", UP)]
    (drawn,) = reinforcement.figures({}, records)
    assert [axes.get_title() for axes in drawn.figure.axes] == ["CartPole, PPO", "CartPole, A2C"]
    assert not [*reinforcement.figures({}, [])]


def test_records_are_checked() -> None:
    check = reinforcement.STUDY.checks["reinforcement"]
    assert check(record("A", UP))
    assert not check(record("A", UP[1:]))
    assert not check(record("A", [math.nan, *UP[1:]]))
    assert not check(record("A", UP, environment="Chess"))


def test_it_covers_what_it_promises() -> None:
    config = reinforcement.settings(quick=False)
    cells = reinforcement.cells(config)
    assert len(cells) == len({*cells}) == 3 * 2 * 6 * 2
    assert cells[:3] == [
        ("CartPole", "A2C", "Adam", 0),
        ("CartPole", "PPO", "Adam", 0),
        ("CartPole", "A2C", "AdaHesScale", 0),
    ]
    assert max(config["rates"]) / min(config["rates"]) >= 1e3
