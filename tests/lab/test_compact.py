"""Runs stored as two files: nothing is lost or rounded, and train, sweep and report know them as before."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hesscale_lab import compact as compact_module
from hesscale_lab import files as whole_files
from hesscale_lab import training
from hesscale_lab.compact import INDEX, TABLE, StoredRun, compact, find_run
from hesscale_lab.report.collect import collect
from hesscale_lab.report.write import write
from hesscale_lab.runs import DamagedRunError, OtherRunError, Run
from hesscale_lab.settings import Settings, folder_of
from hesscale_lab.training import train, trained_model
from hesscale_lab.workers import Status, run_all

from .command import lab
from .made_up_runs import ADAM, make_run, make_seeds

SMALL = Settings("digits", "AdaHesScale", 0.01, 0.9, 0.999, seed=0, epochs=1, subset=96, options=(("every", 2),))


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def content(run: Run) -> tuple[object, ...]:
    return run.config, run.environment, run.records


def some_runs(root: Path) -> list[Run]:
    runs = make_seeds(root, ADAM, [[2, 1, 1 / 3, 1e-17], [2.5, 1, 1, 0.1]])
    return [*runs, make_run(root, replace(ADAM, optimizer="AdaHesScale"), [2.0, 1.0], end="not finite")]


def test_nothing_is_lost_and_nothing_is_rounded(tmp_path: Path) -> None:
    runs = some_runs(tmp_path)
    before = {run.folder: content(run) for run in runs}
    assert compact(tmp_path)[0] == 3
    assert files(tmp_path) == [TABLE, INDEX]
    for folder, kept in before.items():
        found = find_run(folder)
        assert isinstance(found, StoredRun) and content(found) == kept
        assert [type(value) for record in found.records for value in record.values()] == [
            type(value)
            for record in kept[2]  # type: ignore[attr-defined]
            for value in record.values()
        ]


def test_a_person_and_pandas_can_read_the_table(tmp_path: Path) -> None:
    some_runs(tmp_path)
    compact(tmp_path)
    rows = list(csv.DictReader((tmp_path / TABLE).read_text().splitlines()))
    assert len(rows) == 10 and rows[0]["run"] == "digits/AdaHesScale/lr1e-03-b0-b0.999-e3/seed0"
    assert {row["run"].split("/")[1] for row in rows} == {"Adam", "AdaHesScale"}
    assert float(rows[-1]["valid_loss"]) == 0.1 and rows[-1]["epoch"] == "3"
    index = json.loads((tmp_path / INDEX).read_text())
    assert len(index["environments"]) == 1 and index["common"]["task"] == "digits"
    assert len((tmp_path / INDEX).read_text().splitlines()) == 9  # a line for each run


@pytest.mark.usefixtures("undrawn")
def test_the_report_is_the_same(tmp_path: Path) -> None:
    some_runs(tmp_path / "runs")
    for name in ("before", "after"):
        write(collect([tmp_path / "runs"]), tmp_path / name)
        compact(tmp_path / "runs")
    for name in ("report.html", "report.csv"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


def test_a_run_that_is_both_a_folder_and_stored_counts_once(tmp_path: Path) -> None:
    runs = some_runs(tmp_path)
    compact(tmp_path)
    make_run(tmp_path, ADAM, [2, 1, 1 / 3, 1e-17])
    (experiment,) = collect([tmp_path, tmp_path]).experiments
    assert experiment.chosen["Adam"].seeds == (0, 1)
    assert compact(tmp_path)[0] == len(runs) and files(tmp_path) == [TABLE, INDEX]


def test_what_has_not_ended_stays_and_goes_on(tmp_path: Path) -> None:
    some_runs(tmp_path)
    unfinished = make_run(tmp_path, replace(ADAM, lr=0.5), [2, 1], end=None)
    _, left = compact(tmp_path)
    assert left == [f"{unfinished.folder}: it has not ended"]
    assert (unfinished.folder / "metrics.jsonl").exists()
    make_run(tmp_path, replace(ADAM, lr=0.25), [2, 1, 1, 1])
    assert compact(tmp_path)[0] == 4  # what was stored before, and one more


def test_another_run_of_the_same_name_is_not_thrown_away(tmp_path: Path) -> None:
    make_run(tmp_path, ADAM, [2, 1, 1, 1])
    compact(tmp_path)
    other = make_run(tmp_path, ADAM, [2, 1, 1, 0.5])
    assert compact(tmp_path)[1] == [f"{other.folder}: runs.json holds another run of this name"]
    assert other.records[3]["test_loss"] == 0.5
    (stored,) = compact_module.stored_runs(tmp_path).values()
    assert stored.records[3]["test_loss"] == 1


@pytest.mark.parametrize("place", range(5))
def test_a_kill_at_any_moment_loses_nothing(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, replace(ADAM, lr=0.5), [3, 2, 1, 1])
    compact(tmp_path)
    runs = some_runs(tmp_path)
    before = {run.folder: content(run) for run in runs}
    changes = 0

    def count(path: Path) -> None:
        nonlocal changes
        changes += path.name != ".lock"  # which a kill would leave, unlocked
        if changes > place and path.name != ".lock":
            raise KeyboardInterrupt

    replaced, unlink = whole_files.replace, Path.unlink
    with monkeypatch.context() as patch:
        patch.setattr(whole_files, "replace", lambda path, *more: (count(path), replaced(path, *more)))
        patch.setattr(Path, "unlink", lambda path, **options: (count(path), unlink(path, **options)))
        with pytest.raises(KeyboardInterrupt):
            compact(tmp_path)
    for _ in range(2):
        assert {folder: content(find_run(folder)) for folder in before} == before
        assert compact(tmp_path)[0] == 4
    assert files(tmp_path) == [TABLE, INDEX]


def test_training_knows_a_stored_run_and_its_weights_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(SMALL, tmp_path)
    kept = train(SMALL, folder).records
    compact(tmp_path)
    assert files(tmp_path) == [f"digits/AdaHesScale/{folder.parent.name}/seed0/weights.pt", TABLE, INDEX]
    monkeypatch.setattr(training, "load_data", lambda *more, **options: pytest.fail("nothing needs to be read"))
    assert train(SMALL, folder).records == kept
    assert trained_model(folder)[1].weight.shape[1] == 64  # type: ignore[index]
    assert train(SMALL, folder_of(SMALL, Path(tmp_path))).config["options"] == {"every": 2}
    with pytest.raises(OtherRunError, match="holds a run with other"):
        train(replace(SMALL, lr=0.02), folder)


def test_a_sweep_goes_on_from_stored_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lr, last in ((1e-3, 1.0), (1e-2, 0.5)):
        make_seeds(tmp_path, replace(ADAM, lr=lr), [[2, 1, 1, last], [2, 1, 1, last]])
    compact(tmp_path / "digits")  # a folder above the runs, whichever
    (found,) = run_all([ADAM], tmp_path)
    assert (found.status, found.valid_loss) == (Status.FINISHED, 1)
    options = ["--optimizers", "Adam", "--lrs", "1e-3,1e-2", "--beta1s", "0", "--beta2s", "0.999", "--epochs", "3"]
    monkeypatch.setitem(sys.modules, "ray", None)
    code, printed, _ = lab("sweep", "digits", *options, "--seeds", 2, "--out", tmp_path)
    assert code == 0
    assert "│ 1e-2 │ 0, 0.999 │ 4.500 │ 0.5000 ± 0.0000 │ 95.00 ± 0.00 │" in printed


@pytest.mark.parametrize("name, text", [(INDEX, "{"), (INDEX, "[]"), (TABLE, "run,epoch\nx,y\n")])
def test_damaged_files_are_one_sentence(name: str, text: str, tmp_path: Path) -> None:
    some_runs(tmp_path)
    compact(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(DamagedRunError, match="cannot be read"):
        find_run(folder_of(ADAM, tmp_path))
    (left_out,) = collect([tmp_path]).left_out
    assert "runs.json and runs.csv cannot be read" in left_out and "\n" not in left_out


def test_a_table_that_was_cut_is_damaged(tmp_path: Path) -> None:
    some_runs(tmp_path)
    compact(tmp_path)
    whole = (tmp_path / TABLE).read_text()
    rows = whole.splitlines(keepends=True)
    for cut, reason in ((whole[:-3], "ends within a row"), ("".join(rows[:-1]), "has 9 rows of these runs, not 10")):
        (tmp_path / TABLE).write_text(cut)
        with pytest.raises(DamagedRunError, match=reason):
            find_run(folder_of(ADAM, tmp_path))
        (left_out,) = collect([tmp_path]).left_out
        assert "runs.csv" in left_out and "damaged" in left_out and "\n" not in left_out


def test_training_knows_what_was_stored_far_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(SMALL, tmp_path / "runs" / "mine" / "train")
    kept = train(SMALL, folder).records
    compact(tmp_path / "runs")
    (tmp_path / INDEX).write_text("another program's")
    monkeypatch.setattr(training, "load_data", lambda *more, **options: pytest.fail("nothing needs to be read"))
    assert train(SMALL, folder).records == kept
    assert not find_run(tmp_path / "elsewhere" / "a" / "b" / "c" / "d").exists


def test_a_damaged_configuration_is_named_and_stays(tmp_path: Path) -> None:
    first, *_ = some_runs(tmp_path)
    (first.folder / "config.json").write_text('{"kind": "tr')
    count, (line,) = compact(tmp_path)
    assert count == 2 and line.startswith(f"{first.folder}: ") and "config.json is damaged" in line
    assert (first.folder / "metrics.jsonl").exists()


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    some_runs(tmp_path)
    make_run(tmp_path, replace(ADAM, lr=0.5), [2, 1], end=None)
    code, printed, said = lab("compact", tmp_path)
    assert (code, printed) == (0, f"{tmp_path / TABLE} and runs.json hold 3 runs\n")
    assert said.startswith("hesscale: left as it is ") and said.endswith("it has not ended\n")
    (tmp_path / "empty").mkdir()
    assert lab("compact", tmp_path / "empty")[1].startswith("no finished training in ")
    missing = lab("compact", tmp_path / "missing")
    assert missing == (2, "", f"hesscale: {tmp_path / 'missing'} is not a folder\n")
