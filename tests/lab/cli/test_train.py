"""The command ``hesscale train``: what it prints, what it refuses and how."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from hesscale_lab.cli.train import train
from hesscale_lab.files import alone
from hesscale_lab.report.collect import collect
from hesscale_lab.settings import MOST
from hesscale_lab.tasks import download

from ..small_archives import write_mnist
from ..test_files import disk_of

app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command()(train)


def command(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_it_trains_each_seed_and_prints_a_table(tmp_path: Path) -> None:
    code, printed, _ = command(
        "digits", "--optimizer", "SGD", "--seeds", 2, "--epochs", 1, "--field", "activation=relu", "--out", tmp_path
    )
    assert code == 0
    assert "digits, SGD: lr 3e-1" in printed
    folders = sorted((tmp_path / "digits" / "SGD" / "lr3e-01-b0-b0-e1-activation=relu").iterdir())
    assert [folder.name for folder in folders] == ["seed0", "seed1"]
    config = json.loads((folders[1] / "config.json").read_text())
    assert (config["seed"], config["fields"], config["kind"]) == (1, {"activation": "relu"}, "train")
    assert config["command"].endswith("--seed 1 --epochs 1 --field activation=relu")


def test_options_are_part_of_what_a_run_is(tmp_path: Path) -> None:
    options = ("--every", 10, "--bound", 1, "--eps", 1e-6, "--rank", "full", "--trust-region", 0.1)
    code, printed, _ = command("digits", "--epochs", 1, *options, "--out", tmp_path)
    assert code == 0
    assert "digits, AdaHesScale bound=1 eps=1e-06 every=10 rank=full trust_region=0.1: lr" in printed
    (path,) = tmp_path.rglob("config.json")
    name = "lr1e-02-b0.9-b0.999-e1-bound=1-eps=1e-06-every=10-rank=full-trust_region=0.1"
    assert path.parent.parent.name == name
    config = json.loads(path.read_text())
    assert config["options"] == {"bound": 1.0, "eps": 1e-6, "every": 10, "rank": "full", "trust_region": 0.1}
    assert "--bound 1 --eps 1e-06 --every 10 --rank full --trust-region 0.1" in config["command"]
    assert command(*config["command"].split()[2:], "--out", tmp_path)[2] == ""  # the same run, and it is finished


def test_usual_values_leave_a_run_its_name(tmp_path: Path) -> None:
    usual = ("--every", 1, "--bound", "none", "--eps", 1e-8, "--rank", 0, "--trust-region", "none")
    assert command("digits", "--epochs", 1, "--out", tmp_path)[0] == 0
    (path,) = tmp_path.rglob("config.json")
    assert json.loads(path.read_text())["options"] == {}
    assert command("digits", "--epochs", 1, *usual, "--out", tmp_path)[2] == ""
    assert list(tmp_path.rglob("config.json")) == [path]


def test_a_run_that_is_stopped_says_so(tmp_path: Path) -> None:
    code, printed, _ = command("digits", "--optimizer", "SGD", "--lr", 1e38, "--epochs", 2, "--out", tmp_path)
    assert code == 0
    assert "not finite" in printed


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("foo",), "unknown task 'foo': choose among digits, mnist-mlp"),
        (("digits", "--optimizer", "Foo"), "unknown optimizer 'Foo': choose among SGD, Adam"),
        (("digits", "--field", "foo=1"), "unknown field 'foo': choose among variant"),
        (("digits", "--field", "activation"), "a field is given as name=value"),
        (("digits", "--lr", -1), "--lr must be above 0 and below 1e+100, not -1.0"),
        (("digits", "--lr", "inf"), "--lr must be above 0 and below 1e+100, not inf"),
        (("digits", "--lr", "nan"), "--lr must be above 0 and below 1e+100, not nan"),
        (("digits", "--lr", "1e100"), "--lr must be above 0 and below 1e+100, not 1e+100"),
        (("digits", "--seed", 10**9), "--seed must be at most 999999999, not 1000000000"),
        (("digits", "--epochs", 10**9), "--epochs must be at most 999999999, not 1000000000"),
        (("digits", "--optimizer", "SGD", "--beta1", 0.9), "beta1 does not go with SGD: leave --beta1 out"),
        (("digits", "--optimizer", "SGD", "--beta2", 0.9), "beta2 does not go with SGD: leave --beta2 out"),
        (("digits", "--field", "weight_decay=inf"), "weight_decay must be a number from 0, not inf"),
        (("digits", "--field", "width=inf"), "width must be a positive number, not inf"),
        (("digits", "--beta2", 1), "--beta2 must be at least 0 and below 1, not 1.0"),
        (("digits", "--seeds", 0), "--seeds must be at least 1, not 0"),
        (("digits", "--seeds", 2, "--seed", 1), "choose one of --seed and --seeds"),
        (("digits", "--every", 0), "--every must be a whole number of steps, 1 or more, not '0'"),
        (("digits", "--eps", "x"), "--eps must be a positive number, not 'x'"),
        (
            ("digits", "--bound", "nan"),
            "--bound must be a positive number, or none for the paper's algorithm, not 'nan'",
        ),
        (("digits", "--trust-region", -1), "--trust-region must be a positive number, or none, not '-1'"),
        (("digits", "--rank", "all"), "--rank must be a whole number of columns, 0 or more, or full, not 'all'"),
        (("digits", "--every", "1,10"), "--every is one value here, not '1,10': hesscale sweep takes several"),
        (("digits", "--optimizer", "Adam", "--rank", 1), "Adam takes no rank: its options are eps"),
        (("digits", "--optimizer", "AdaHessian", "--rank", "full"), "AdaHessian takes no rank: its options are every"),
        (("digits", "--optimizer", "SGD", "--eps", 1), "SGD takes no eps: its options are none of these"),
        (("digits", "--subset", 5000), "there are 1200 training examples, not 5000"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(arguments: tuple[object, ...], complaint: str, tmp_path: Path) -> None:
    code, printed, said = command(*arguments, "--out", tmp_path)
    assert (code, printed) == (2, "")
    assert said.startswith(f"hesscale: {complaint}")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line_and_code_1(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    code, _, said = command("digits", "--out", tmp_path / "taken")
    assert code == 1
    assert said.startswith("hesscale: cannot write to ")
    assert said.count("\n") == 1


def test_a_folder_in_use_is_one_line_and_code_1(tmp_path: Path) -> None:
    folder = tmp_path / "digits" / "AdaHesScale" / "lr1e-02-b0.9-b0.999-e1" / "seed0"
    with alone(folder):
        code, printed, said = command("digits", "--epochs", 1, "--out", tmp_path)
    assert (code, printed) == (1, "")
    assert said.startswith(f"hesscale: process {os.getpid()} on ")
    assert said.endswith(f" works in {folder}: wait for its end, or stop it\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "checkpoint.pt"])
def test_a_damaged_file_is_one_line_and_code_1(name: str, tmp_path: Path) -> None:
    arguments = ("digits", "--optimizer", "SGD", "--epochs", 1, "--out", tmp_path)
    assert command(*arguments)[0] == 0
    (path,) = tmp_path.rglob("metrics.jsonl")
    if name == "checkpoint.pt":
        path.unlink()
    path.with_name(name).write_text("garbage\n")
    code, printed, said = command(*arguments)
    assert (code, printed) == (1, "")
    assert said.startswith(f"hesscale: {path.with_name(name)}")
    assert "delete" in said and said.count("\n") == 1


def test_a_full_disk_is_one_line_and_code_1(tmp_path: Path) -> None:
    """The checkpoint of 30 kB does not fit; torch by itself would say something about an unexpected position."""
    with disk_of(16384):
        code, printed, said = command("digits", "--epochs", 1, "--out", tmp_path)
    assert (code, printed) == (1, "")
    assert said.splitlines()[-1] == f"hesscale: cannot write to {tmp_path}: File too large"
    assert "Traceback" not in said
    assert command("digits", "--epochs", 1, "--out", tmp_path)[0] == 0


def test_without_a_terminal_there_is_a_line_for_every_epoch(tmp_path: Path) -> None:
    arguments = ("digits", "--optimizer", "SGD", "--seeds", 2, "--epochs", 2, "--out", tmp_path)
    _, _, said = command(*arguments)
    lines = said.splitlines()
    assert [line[:19] for line in lines] == [f"seed {seed}  epoch {e}/2  " for seed in (0, 1) for e in range(3)]
    assert all("valid loss 0." in line and "test accuracy " in line for line in (lines[2], lines[5]))
    assert command(*arguments)[2] == ""  # nothing was trained


def test_a_field_given_twice_counts_once(tmp_path: Path) -> None:
    fields = ("--field", "width=0.5", "--field", "activation=relu", "--field", "width=2")
    assert command("digits", "--epochs", 0, *fields, "--out", tmp_path)[0] == 0
    (path,) = tmp_path.rglob("config.json")
    assert json.loads(path.read_text())["fields"] == {"activation": "relu", "width": 2.0}
    assert path.parent.parent.name.endswith("-activation=relu-width=2.0")


def test_data_that_cannot_be_had_is_one_line_and_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(url: str, **more: object) -> None:
        raise OSError("no network")

    monkeypatch.setenv("HESSCALE_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "_pooch", lambda: offline)
    write_mnist(tmp_path / "damaged", 3)
    (tmp_path / "damaged" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"\x1f\x8b")
    for options, complaint in (
        ((), "cannot download MNIST (no network): run `mkdir -p data/MNIST/raw"),
        (("--data", tmp_path), f"{tmp_path / 'MNIST' / 'raw'}"),
        (("--data", tmp_path / "damaged"), f"{tmp_path / 'damaged'}"),
    ):
        code, _, said = command("mnist-mlp", *options, "--out", tmp_path / "run")
        assert code == 1
        assert said.startswith(f"hesscale: {complaint}")
        assert said.count("\n") == 1


def test_the_recorded_command_repeats_a_run_of_sgd(tmp_path: Path) -> None:
    assert command("digits", "--optimizer", "SGD", "--epochs", 0, "--out", tmp_path)[0] == 0
    (path,) = tmp_path.rglob("config.json")
    assert command(*json.loads(path.read_text())["command"].split()[2:], "--out", tmp_path)[::2] == (0, "")


def test_what_train_accepts_a_report_reads(tmp_path: Path) -> None:
    largest = ("--seed", MOST, "--lr", 9e99)
    assert command("digits", *largest, "--epochs", 0, "--out", tmp_path)[0] == 0
    found = collect([tmp_path])
    assert not found.left_out and found.experiments[0].series[0].seeds == (MOST,)


def test_help_shows_examples() -> None:
    code, printed, _ = command("--help")
    assert code == 0
    assert "hesscale train digits --optimizer AdaHesScale --seeds 3" in printed


def test_threads_are_set_as_asked(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        assert command("digits", "--epochs", 0, "--threads", 2, "--out", tmp_path)[0] == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
