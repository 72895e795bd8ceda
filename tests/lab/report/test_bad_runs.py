"""A bad run never hides the others: a report names it in one sentence and leaves it out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hesscale_lab.histories import METRICS
from hesscale_lab.report.collect import collect
from hesscale_lab.runs import Run
from hesscale_lab.studies.table import STUDIES

from ..command import lab
from ..made_up_runs import ADAM, make_run

RESULTS = Path(__file__).parents[3] / "results"
FORMULA = r"$\frac{$"


def change(run: Run, **settings: Any) -> None:
    config = json.loads((run.folder / "config.json").read_text())
    config = {name: value for name, value in {**config, **settings}.items() if value != "gone"}
    (run.folder / "config.json").write_text(json.dumps(config))


def append(content: bytes) -> Callable[[Run], None]:
    def damage(run: Run) -> None:
        with (run.folder / "metrics.jsonl").open("ab") as file:
            file.write(content)

    return damage


def write(name: str, content: bytes) -> Callable[[Run], None]:
    return lambda run: (run.folder / name).write_bytes(content) and None


BAD: dict[str, Callable[[Run], None]] = {
    "its lr is inf": lambda run: change(run, lr=float("inf")),
    "its lr is nan": lambda run: change(run, lr=float("nan")),
    "its lr is '0.1'": lambda run: change(run, lr="0.1"),
    "its lr is 0": lambda run: change(run, lr=0),
    "its lr is None": lambda run: change(run, lr="gone"),
    "its lr is 1000": lambda run: change(run, lr=10**400),  # a whole number beyond all floats
    "its epochs is 1000": lambda run: change(run, epochs=10**12),
    "its beta2 is [0.9]": lambda run: change(run, beta2=[0.9]),
    "its seed is None": lambda run: change(run, seed="gone"),
    "its epochs is 'three'": lambda run: change(run, epochs="three"),
    "its subset is {}": lambda run: change(run, subset={}),
    "its fields is {'width': '\\x07'}": lambda run: change(run, fields={"width": "\a"}),
    "its fields is 3": lambda run: change(run, fields=3),
    "its task is None": lambda run: change(run, task=None),
    "its optimizer is '\\ud800'": lambda run: change(run, optimizer="\ud800"),
    "config.json holds no settings": write("config.json", b"[1, 2]"),
    "config.json is not readable (": write("config.json", b'{"kind": "tr'),
    "metrics.jsonl is not readable (": append(b"garbage\n"),
    "metrics.jsonl is not readable (R": append(b"[" * 100_000 + b"\n"),
    "metrics.jsonl is not readable (O": append(b'{"kind": "epoch", "epoch": 3, "seconds": 1%s}\n' % (b"0" * 400)),
    "metrics.jsonl is not readable (D": append(b'{"kind": "epoch", "epoch": 2}\n'),
    "metrics.jsonl is not readable (_": append(b"\xff\xfe\n"),
    "metrics.jsonl is not readable (__": append(b"[1]\n"),
    "metrics.jsonl has numbers beyond 1e+100": lambda run: (
        make_run(run.folder.parent, replace(ADAM, lr=0.5), [2, 1e200, 1, 1], folder=run.folder) and None
    ),
    "metrics.jsonl is not readable (DamagedRunError: line": append(
        json.dumps({"kind": "epoch", "epoch": 3, "seconds": -6.0, **dict.fromkeys(METRICS, 1.0)}).encode() + b"\n"
    ),
    "the seconds in metrics.jsonl do not grow from 0, epoch by epoch": append(
        json.dumps({"kind": "epoch", "epoch": 3, "seconds": 3.0, **dict.fromkeys(METRICS, 1.0)}).encode() + b"\n"
    ),
    "its plugin is 3": lambda run: change(run, plugin=3, optimizer="Mine"),
    "its text is [1]": lambda run: change(run, text=[1]),
    "nothing measured yet": lambda run: (run.folder / "metrics.jsonl").unlink(),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_run_is_named_and_the_others_are_reported(reason: str, tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", ADAM, [2, 1, 1, 1])
    bad = make_run(tmp_path / "bad", replace(ADAM, lr=0.5), [2, 1, 1, 1])
    BAD[reason](bad)
    found = collect([tmp_path])
    (line,) = found.left_out
    assert line.startswith(f"{bad.folder}: {reason.partition(' (')[0]}")
    assert "\n" not in line
    (experiment,) = found.experiments
    assert [series.lr for series in experiment.series] == [ADAM.lr]
    assert good.folder.exists()


@pytest.mark.usefixtures("undrawn")
def test_the_command_says_so_and_succeeds(tmp_path: Path) -> None:
    make_run(tmp_path / "good", ADAM, [2, 1, 1, 1])
    bad = make_run(tmp_path / "bad", replace(ADAM, lr=0.5), [2, 1, 1, 1])
    change(bad, lr=float("inf"))
    code, _, complaints = lab("report", tmp_path, "--out", tmp_path / "report")
    assert (code, complaints) == (0, f"hesscale: left out {bad.folder}: its lr is inf\n")
    assert "its lr is inf" in (tmp_path / "report" / "report.html").read_text()


def test_names_are_never_read_as_mathematics(tmp_path: Path) -> None:
    """Matplotlib takes what stands between two $ for a formula."""
    for lr in (0.1, 0.2):
        make_run(tmp_path, replace(ADAM, lr=lr), [2, 1, 1, 1])
        named = make_run(tmp_path / "named", replace(ADAM, lr=lr), [2, 1, 1, 1])
        change(named, optimizer=FORMULA, task=FORMULA, fields={FORMULA: FORMULA})
    code, _, complaints = lab("report", tmp_path, "--out", tmp_path / "report")
    assert (code, complaints) == (0, "")
    assert FORMULA in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_long_field_is_no_long_file_name(tmp_path: Path) -> None:
    for field in ("x" * 300, "x" * 301):
        change(
            make_run(tmp_path / field[:100], ADAM, [2, 1, 1, 1], folder=tmp_path / str(len(field))), fields={"a": field}
        )
    code, _, complaints = lab("report", tmp_path, "--out", tmp_path / "report")
    assert (code, complaints) == (0, "")
    assert len(list((tmp_path / "report").glob("*-epochs.png"))) == 2


def test_a_damaged_environment_costs_no_run(tmp_path: Path) -> None:
    for seed, content in enumerate((b"{", b"[1]", b"\xff")):
        write("environment.json", content)(make_run(tmp_path, replace(ADAM, seed=seed), [2, 1, 1, 1]))
    found = collect([tmp_path])
    assert found.left_out == ()
    assert found.experiments[0].series[0].seeds == (0, 1, 2)


def quality_folder(root: Path, *, damage: bytes) -> Path:
    """A small copy of a committed study, with one line more."""
    source, folder = RESULTS / "quality" / "cnn", root / "quality"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    (folder / "metrics.jsonl").write_bytes(damage + b"\n" + (source / "metrics.jsonl").read_bytes())
    return folder


@pytest.mark.parametrize(
    "damage", [b"garbage", b"\xff", b'{"kind": "quality"}', b'{"kind": "time", "seconds": null}', b"3"]
)
def test_a_bad_line_of_a_study_is_named_and_the_rest_is_drawn(damage: bytes, tmp_path: Path) -> None:
    folder = quality_folder(tmp_path, damage=damage)
    found = collect([tmp_path])
    assert found.left_out == (f"line 1 of {folder / 'metrics.jsonl'}: not readable",)
    (study,) = found.studies
    assert study.tables == collect([RESULTS / "quality" / "cnn"]).studies[0].tables


@pytest.mark.usefixtures("undrawn")
def test_records_of_two_networks_in_one_folder_are_named(tmp_path: Path) -> None:
    line = (RESULTS / "quality" / "paper" / "metrics.jsonl").read_bytes().splitlines()[0]
    folder = quality_folder(tmp_path, damage=line)
    make_run(tmp_path / "good", ADAM, [2, 1, 1, 1])
    code, _, complaint = lab("report", tmp_path, "--out", tmp_path / "report")
    assert code == 0
    assert complaint.startswith(f"hesscale: left out {folder}: its records do not go together (")


@pytest.mark.usefixtures("undrawn")
def test_a_figure_that_cannot_be_drawn_costs_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hesscale_lab.report import write as writing

    for task in ("digits", "mnist-mlp"):
        make_run(tmp_path, replace(ADAM, task=task), [2, 1, 1, 1])
    draw = writing.learning_curves.draw

    def fails(experiment: Any, *more: Any, **options: Any) -> Any:
        if experiment.task == "digits":
            raise OverflowError("cannot convert\nfloat infinity to integer")
        return draw(experiment, *more, **options)

    monkeypatch.setattr(writing.learning_curves, "draw", fails)
    code, _, complaints = lab("report", tmp_path, "--out", tmp_path / "report")
    assert code == 0
    reason = "cannot be drawn (OverflowError: cannot convert float infinity to integer)"
    assert complaints == f"hesscale: left out digits, 3 epochs: {reason}\n"
    assert "mnist-mlp, 3 epochs" in (tmp_path / "report" / "report.html").read_text()


def test_committed_results_are_readable_whole_and_have_the_librarys_names() -> None:
    found = collect([RESULTS])
    assert found.left_out == ()
    names = {series.optimizer for experiment in found.experiments for series in experiment.series}
    assert names == {"AdaBL89", "AdaGGNMC", "AdaHesScale", "AdaHesScaleGN", "AdaHessian", "Adam", "AdamFused", "SGD"}
    commands = {command for e in found.experiments for series in e.series for command in series.commands}
    assert not any("--optimizer BL89" in command or "--optimizer GGNMC" in command for command in commands)
    assert {study.config["kind"] for study in found.studies} == {*STUDIES}
    assert all(study.tables for study in found.studies)
