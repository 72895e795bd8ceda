"""Which runs are one experiment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hesscale_lab.compact import compact
from hesscale_lab.report.collect import collect

from ..made_up_runs import ADAM, make_run, make_seeds


def test_runs_of_other_folders_are_other_experiments(tmp_path: Path) -> None:
    make_seeds(tmp_path / "train", ADAM, [[3, 2, 1, 1], [3, 2, 1, 1]])
    make_seeds(tmp_path / "again", ADAM, [[3, 3, 3, 3]])
    make_run(tmp_path / "again", replace(ADAM, epochs=1), [3, 2])
    found = {experiment.name: experiment for experiment in collect([tmp_path]).experiments}
    assert set(found) == {"digits-e3", "again-digits-e3", "digits-e1"}
    assert [series.seeds for series in found["digits-e3"].series] == [(0, 1)]
    assert found["again-digits-e3"].title == "digits, 3 epochs, in again"
    assert found["digits-e1"].place == ""


def test_stored_runs_are_of_the_folder_they_were_in(tmp_path: Path) -> None:
    make_seeds(tmp_path / "train", ADAM, [[3, 2, 1, 1]])
    make_seeds(tmp_path / "again", ADAM, [[3, 2, 2, 2]])
    names = {experiment.name for experiment in collect([tmp_path]).experiments}
    for folder in ("train", "again"):
        compact(tmp_path / folder / "digits")
    assert (
        {experiment.name for experiment in collect([tmp_path]).experiments} == names == {"digits-e3", "again-digits-e3"}
    )
