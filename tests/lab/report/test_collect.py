"""Which runs are one experiment."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hesscale_lab.compact import compact
from hesscale_lab.plugins import Plugin
from hesscale_lab.report.collect import collect
from hesscale_lab.report.write import write

from ..made_up_runs import ADAM, make_run, make_seeds


def test_runs_of_other_folders_are_other_experiments(tmp_path: Path) -> None:
    make_seeds(tmp_path / "train", ADAM, [[3, 2, 1, 1], [3, 2, 1, 1]])
    make_seeds(tmp_path / "again", ADAM, [[3, 3, 3, 3]])
    make_run(tmp_path / "again", replace(ADAM, epochs=1), [3, 2])
    found = {experiment.name: experiment for experiment in collect([tmp_path]).experiments}
    assert set(found) == {"digits-e3", "again-digits-e3", "digits-e1"}
    assert [series.seeds for series in found["digits-e3"].series] == [(0, 1)]
    assert found["again-digits-e3"].title == "digits, 3 epochs, in again"
    assert found["digits-e1"].out == ""


def test_stored_runs_are_of_the_folder_they_were_in(tmp_path: Path) -> None:
    make_seeds(tmp_path / "train", ADAM, [[3, 2, 1, 1]])
    make_seeds(tmp_path / "again", ADAM, [[3, 2, 2, 2]])
    names = {experiment.name for experiment in collect([tmp_path]).experiments}
    for folder in ("train", "again"):
        compact(tmp_path / folder / "digits")
    assert (
        {experiment.name for experiment in collect([tmp_path]).experiments} == names == {"digits-e3", "again-digits-e3"}
    )


def test_a_seed_counts_once(tmp_path: Path) -> None:
    runs = make_seeds(tmp_path, ADAM, [[3, 2, 1, 1], [3, 2, 1, 0.5]])
    copied = runs[0].folder.with_name("seed0 (copy)")
    shutil.copytree(runs[0].folder, copied)
    begun = make_run(tmp_path, replace(ADAM, seed=1), [3, 2], end=None, folder=runs[1].folder.with_name("a-seed1"))
    found = collect([tmp_path])
    assert [series.seeds for experiment in found.experiments for series in experiment.series] == [(0, 1)]
    assert found.experiments[0].series[0].values["test_loss"][-1].mean == 0.75
    assert sorted(found.left_out) == [
        f"{begun.folder}: the same setting and seed as {runs[1].folder}",
        f"{copied}: the same setting and seed as {runs[0].folder}",
    ]


def test_a_copied_task_is_a_place_of_its_own(tmp_path: Path) -> None:
    make_seeds(tmp_path / "train", ADAM, [[3, 2, 1, 1]])
    shutil.copytree(tmp_path / "train" / "digits", tmp_path / "train" / "digits-before")
    found = collect([tmp_path])
    assert not found.left_out
    assert {e.name: e.series[0].seeds for e in found.experiments} == {
        "digits-e3": (0,),
        "digits-before-digits-e3": (0,),
    }


@pytest.mark.usefixtures("undrawn")
def test_folders_of_the_same_name_are_told_apart_by_what_is_above_them(tmp_path: Path) -> None:
    for place, last in (("a/train", 1), ("b/train", 2), ("b/old", 3)):
        make_seeds(tmp_path / place, ADAM, [[3, 2, 1, last]])
    make_run(tmp_path / "b" / "old", replace(ADAM, epochs=1), [3, 2])
    collection = collect([tmp_path])
    assert {e.name: e.title for e in collection.experiments} == {
        "a-train-digits-e3": "digits, 3 epochs, in a/train",
        "b-train-digits-e3": "digits, 3 epochs, in b/train",
        "old-digits-e3": "digits, 3 epochs, in old",
        "digits-e1": "digits, 1 epoch",
    }
    write(collection, tmp_path / "report")
    assert len(list((tmp_path / "report").glob("*-epochs.png"))) == 4
    rows = list(csv.DictReader((tmp_path / "report" / "report.csv").read_text().splitlines()))
    assert {(row["place"], row["of_epochs"], row["test_loss"]) for row in rows if row["epoch"] == row["of_epochs"]} == {
        ("a/train", "3", "1.0"),
        ("b/train", "3", "2.0"),
        ("old", "3", "3.0"),
        ("old", "1", "2.0"),
    }


def test_names_that_differ_in_lost_signs_only_are_told_apart(tmp_path: Path) -> None:
    for place in ("a b", "a-b", "A-b", "train"):
        make_seeds(tmp_path / place, ADAM, [[3, 2, 1, 1]])
    names = [experiment.name for experiment in collect([tmp_path]).experiments]
    assert len({name.casefold() for name in names}) == 4 and "digits-e3" in names


def test_optimizers_of_two_plugins_are_two(tmp_path: Path) -> None:
    for seed, source in enumerate(("one", "two")):
        own = replace(ADAM, optimizer="Mine", seed=seed, plugin=Plugin("mine.py", source))
        make_run(tmp_path, own, [3, 2, 1, 1])
        make_run(tmp_path, replace(own, optimizer="Adam"), [3, 2, 1, 1])  # the lab's own, whichever file was there
    (experiment,) = collect([tmp_path]).experiments
    digests = [Plugin("mine.py", source).digest[:8] for source in ("one", "two")]
    found = {name: series.seeds for name, series in experiment.chosen.items()}
    assert found == {"Adam": (0, 1), **{f"Mine plugin={digest}": (seed,) for seed, digest in enumerate(digests)}}


def test_tasks_of_two_plugins_are_two(tmp_path: Path) -> None:
    for seed, source in enumerate(("one", "two")):
        own = replace(ADAM, task="mine", seed=seed, plugin=Plugin("mine.py", source))
        make_run(tmp_path / str(seed), own, [3, 2, 1, 1])
        make_run(tmp_path / "together", own, [3, 2, 1, 1])
    (alone,) = collect([tmp_path / "0"]).experiments
    assert alone.title == "mine, 3 epochs"
    digests = [Plugin("mine.py", source).digest[:8] for source in ("one", "two")]
    assert {e.title: e.series[0].seeds for e in collect([tmp_path / "together"]).experiments} == {
        f"mine, 3 epochs, source {digest}": (seed,) for seed, digest in enumerate(digests)
    }


def test_runs_of_two_texts_are_two_experiments(tmp_path: Path) -> None:
    for seed, digest in enumerate(("1" * 16, "2" * 16)):
        make_run(tmp_path, replace(ADAM, task="text-gpt", seed=seed, text=digest), [3, 2, 1, 1])
    assert {e.title: e.series[0].seeds for e in collect([tmp_path]).experiments} == {
        "text-gpt, 3 epochs, source 11111111": (0,),
        "text-gpt, 3 epochs, source 22222222": (1,),
    }
