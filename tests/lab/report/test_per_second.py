"""Trainings by measured seconds: times and areas by hand, wins and losses that need more than luck."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hesscale_lab.histories import METRICS, read_history
from hesscale_lab.report.collect import collect
from hesscale_lab.report.per_second import Comparison, area, baseline_of, comparisons, per_second_table, reach, verdict
from hesscale_lab.report.write import _write_numbers
from hesscale_lab.runs import open_run
from hesscale_lab.settings import folder_of
from hesscale_lab.wording import Estimate

from ..made_up_runs import ADAM, make_run, make_seeds


def timed(
    root: Path, name: str, losses: Sequence[float], *, epoch: float, seed: int = 0, end: str | None = "finished"
) -> None:
    """A run whose epochs take so many seconds each."""
    settings = replace(ADAM, optimizer=name, seed=seed)
    run = open_run(folder_of(settings, root), settings.as_config())
    for number, loss in enumerate(losses):
        run.add({"kind": "epoch", "epoch": number, "seconds": epoch * number, **dict.fromkeys(METRICS, loss)})
    if end:
        run.add({"kind": "end", "reason": end, "epoch": len(losses) - 1, "step": 1})


def compared(root: Path) -> dict[str, Comparison]:
    (experiment,) = collect([root]).experiments
    return {found.series.label: found for found in comparisons(experiment)}


def test_times_and_areas_by_hand(tmp_path: Path) -> None:
    history = read_history(make_run(tmp_path, ADAM, [4, 2, 2, 1]))  # at 0, 2, 4 and 6 seconds
    assert history is not None
    assert [reach(history, target) for target in (5, 4, 3, 2, 1.5, 1)] == [0, 0, 1, 2, 5, 6]
    assert reach(history, 0.5) is None
    assert [area(history, end) for end in (1, 2, 4, 5, 6)] == [3.5, 6, 10, 11.75, 13]


def test_every_run_is_compared_with_adams_of_its_seed(tmp_path: Path) -> None:
    for seed, shift in ((0, 0.0), (1, 1.0)):
        timed(tmp_path, "Adam", [4 + shift, 3 + shift, 2 + shift, 1 + shift], epoch=2, seed=seed)
    timed(tmp_path, "AdaHesScale", [4, 2, 1, 0.5], epoch=2, seed=0)  # there after 4 s of Adam's 6
    timed(tmp_path, "AdaHesScale", [5, 2, 1, 0.5], epoch=3, seed=1)  # after 3 s
    timed(tmp_path, "AdaHesScale", [0, 0, 0, 0], epoch=1, seed=7)  # Adam has no such seed
    found = compared(tmp_path)["AdaHesScale"]
    assert (found.seeds, found.reached, found.open) == (2, 2, 0)
    assert found.seconds == (3.5, pytest.approx(0.5))
    assert found.time is not None and found.time.mean == pytest.approx((4 / 6 + 3 / 6) / 2)
    areas = [(6 + 3 + 1.5) / (7 + 5 + 3), (10.5 + 4.5) / (9 + 7 + 5)]  # over Adam's 6 seconds
    assert found.area is not None and found.area.mean == pytest.approx(sum(areas) / 2)


def test_a_run_that_does_not_arrive_loses_if_it_had_the_time(tmp_path: Path) -> None:
    timed(tmp_path, "Adam", [4, 3, 2, 1], epoch=2)
    timed(tmp_path, "AdaHessian", [4, 3, 3, 2], epoch=4)
    timed(tmp_path, "SGD", [4, 3, 2, 1.5], epoch=1)  # its 3 s are no answer
    timed(tmp_path, "AdaGGNMC", [4, 3], epoch=2, end="not finite")
    found = compared(tmp_path)
    verdicts = {name: (one.time_verdict, one.area_verdict) for name, one in found.items()}
    assert verdicts["AdaHessian"] == ("behind, 1 seed", "behind, 1 seed")
    assert verdicts["SGD"] == ("open", "ahead, 1 seed")
    assert verdicts["AdaGGNMC"] == ("behind, 1 seed", "behind, 1 seed")
    broken = found["AdaGGNMC"].area
    assert broken is not None and broken.mean == pytest.approx((7 + 4 * 4) / 15)  # from 2 s on with its first loss
    assert found["AdaHessian"].time is None


def test_where_adam_ended_no_lower_than_it_began_there_is_no_time(tmp_path: Path) -> None:
    timed(tmp_path, "Adam", [4, 3, 5, 6], epoch=2)
    timed(tmp_path, "AdaHesScale", [4, 2, 1, 0.5], epoch=2)
    (found,) = compared(tmp_path).values()
    assert (found.time, found.seconds, found.reached) == (None, None, 0)
    assert (found.time_verdict, found.area_verdict) == ("open", "ahead, 1 seed")
    table = per_second_table(collect([tmp_path]).experiments[0])
    assert table is not None and table.rows[0][2:5] == ("", "", "open")


def test_losses_that_are_not_above_0_have_no_ratio_of_areas(tmp_path: Path) -> None:
    timed(tmp_path, "Adam", [1, -1, -2, -3], epoch=2)
    timed(tmp_path, "AdaHesScale", [1, -3, -6, -9], epoch=2)  # better everywhere, and a ratio above 1
    (found,) = compared(tmp_path).values()
    assert (found.area, found.area_verdict, found.time_verdict) == (None, "open", "ahead, 1 seed")
    table = per_second_table(collect([tmp_path]).experiments[0])
    assert table is not None and table.rows[0][5:] == ("", "open")
    _write_numbers(collect([tmp_path]), tmp_path)
    (line,) = csv.DictReader((tmp_path / "seconds.csv").read_text().splitlines())
    assert (line["place"], line["area"], line["area_verdict"]) == (tmp_path.name, "", "open")


def test_who_arrives_with_some_seeds_neither_wins_nor_loses(tmp_path: Path) -> None:
    for seed in range(3):
        timed(tmp_path, "Adam", [4, 3, 2, 1], epoch=2, seed=seed)
        timed(tmp_path, "AdaHesScale", [4, 2, 1.5, 0.9 if seed else 1.1], epoch=2, seed=seed)
        timed(tmp_path, "AdaHessian", [4, 3, 3, 2], epoch=4, seed=seed)
    verdicts = {name: found.time_verdict for name, found in compared(tmp_path).items()}
    assert verdicts == {"AdaHesScale": "2 of 3 arrived", "AdaHessian": "loses"}


def test_a_verdict_takes_two_standard_errors() -> None:
    assert verdict(Estimate(0.9, 0.04), 3) == "wins"
    assert verdict(Estimate(0.9, 0.06), 3) == "no difference"
    assert verdict(Estimate(1.1, 0.04), 3) == "loses"
    assert verdict(Estimate(0.5, float("nan")), 1) == "ahead, 1 seed"


def test_the_baseline_is_the_fastest_adam_whose_runs_are_whole(tmp_path: Path) -> None:
    timed(tmp_path, "Adam", [4, 3, 2, 1], epoch=1)
    (experiment,) = collect([tmp_path]).experiments
    assert baseline_of(experiment) == "Adam" and per_second_table(experiment) is None
    timed(tmp_path, "AdamFused", [4, 3], epoch=1, end=None)
    (experiment,) = collect([tmp_path]).experiments
    assert baseline_of(experiment) == "Adam"
    assert [found.series.label for found in comparisons(experiment)] == ["AdamFused"]
    timed(tmp_path / "both", "Adam", [4, 3, 2, 1], epoch=1)
    timed(tmp_path / "both", "AdamFused", [4, 3, 2, 1], epoch=1)
    (experiment,) = collect([tmp_path / "both"]).experiments
    assert baseline_of(experiment) == "AdamFused"
    timed(tmp_path / "only", "SGD", [4, 3, 2, 1], epoch=1)
    (experiment,) = collect([tmp_path / "only"]).experiments
    assert baseline_of(experiment) is None and per_second_table(experiment) is None


def test_the_table_and_the_numbers_show_seeds_and_spreads(tmp_path: Path) -> None:
    make_seeds(tmp_path / "runs", ADAM, [[4, 3, 2, 1], [4, 3, 2, 1], [4, 3, 2, 1]])
    lazy = replace(ADAM, optimizer="AdaHesScale", options=(("every", 10),))
    make_seeds(tmp_path / "runs", lazy, [[4, 2, 1, 1], [4, 2.5, 1, 1], [4, 2, 1, 1]])
    collection = collect([tmp_path / "runs"])
    table = per_second_table(collection.experiments[0])
    assert table is not None
    row = ("AdaHesScale every=10", "3", "4.0 ± 0.0", "0.667 ± 0.000", "wins", "0.756 ± 0.022", "wins")
    assert table.rows == (row,)
    _write_numbers(collection, tmp_path)
    (line,) = csv.DictReader((tmp_path / "seconds.csv").read_text().splitlines())
    assert (line["against"], line["options"], line["seeds"], line["reached"]) == ("Adam", "every=10", "3", "3")
    assert float(line["area"]) == pytest.approx((11 + 12 + 11) / 45)
    assert (line["time_verdict"], line["area_verdict"]) == ("wins", "wins")
