"""The command ``hesscale train``: what it prints, what it refuses and how."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from hesscale_lab.files import alone
from hesscale_lab.report.collect import collect
from hesscale_lab.settings import MOST

from ..command import lab
from ..test_files import disk_of


def test_it_trains_each_seed_and_prints_a_table(tmp_path: Path) -> None:
    code, printed, _ = lab(
        "train",
        "digits",
        "--optimizer",
        "SGD",
        "--seeds",
        2,
        "--epochs",
        1,
        "--field",
        "activation=relu",
        "--out",
        tmp_path,
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
    code, printed, _ = lab("train", "digits", "--epochs", 1, *options, "--out", tmp_path)
    assert code == 0
    assert "digits, AdaHesScale bound=1 eps=1e-06 every=10 rank=full trust_region=0.1: lr" in printed
    (path,) = tmp_path.rglob("config.json")
    name = "lr1e-02-b0.9-b0.999-e1-bound=1-eps=1e-06-every=10-rank=full-trust_region=0.1"
    assert path.parent.parent.name == name
    config = json.loads(path.read_text())
    assert config["options"] == {"bound": 1.0, "eps": 1e-6, "every": 10, "rank": "full", "trust_region": 0.1}
    assert "--bound 1 --eps 1e-06 --every 10 --rank full --trust-region 0.1" in config["command"]
    assert lab("train", *config["command"].split()[2:], "--out", tmp_path)[2] == ""


def test_usual_values_leave_a_run_its_name(tmp_path: Path) -> None:
    usual = ("--every", 1, "--bound", "none", "--eps", 1e-8, "--rank", 0, "--trust-region", "none")
    assert lab("train", "digits", "--epochs", 1, "--out", tmp_path)[0] == 0
    (path,) = tmp_path.rglob("config.json")
    assert json.loads(path.read_text())["options"] == {}
    assert lab("train", "digits", "--epochs", 1, *usual, "--out", tmp_path)[2] == ""
    assert list(tmp_path.rglob("config.json")) == [path]


def test_a_run_that_is_stopped_says_so(tmp_path: Path) -> None:
    code, printed, _ = lab("train", "digits", "--optimizer", "SGD", "--lr", 1e38, "--epochs", 2, "--out", tmp_path)
    assert code == 0
    assert "not finite" in printed


def test_a_folder_in_use_is_one_line_and_code_1(tmp_path: Path) -> None:
    folder = tmp_path / "digits" / "AdaHesScale" / "lr1e-02-b0.9-b0.999-e1" / "seed0"
    with alone(folder):
        code, printed, said = lab("train", "digits", "--epochs", 1, "--out", tmp_path)
    assert (code, printed) == (1, "")
    assert said.startswith(f"hesscale: process {os.getpid()} on ")
    assert said.endswith(f" works in {folder}: wait for its end, or stop it\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "checkpoint.pt"])
def test_a_damaged_file_is_one_line_and_code_1(name: str, tmp_path: Path) -> None:
    arguments = ("digits", "--optimizer", "SGD", "--epochs", 1, "--out", tmp_path)
    assert lab("train", *arguments)[0] == 0
    (path,) = tmp_path.rglob("metrics.jsonl")
    if name == "checkpoint.pt":
        path.unlink()
    path.with_name(name).write_text("garbage\n")
    code, printed, said = lab("train", *arguments)
    assert (code, printed) == (1, "")
    assert said.startswith(f"hesscale: {path.with_name(name)}")
    assert "delete" in said and said.count("\n") == 1


def test_a_full_disk_is_one_line_and_code_1(tmp_path: Path) -> None:
    """The checkpoint of 30 kB does not fit; torch by itself would say something about an unexpected position."""
    with disk_of(16384):
        code, printed, said = lab("train", "digits", "--epochs", 1, "--out", tmp_path)
    assert (code, printed) == (1, "")
    assert said.splitlines()[-1] == f"hesscale: cannot write to {tmp_path}: File too large"
    assert "Traceback" not in said
    assert lab("train", "digits", "--epochs", 1, "--out", tmp_path)[0] == 0


def test_without_a_terminal_there_is_a_line_for_every_epoch(tmp_path: Path) -> None:
    arguments = ("digits", "--optimizer", "SGD", "--seeds", 2, "--epochs", 2, "--out", tmp_path)
    _, _, said = lab("train", *arguments)
    lines = said.splitlines()
    assert [line[:19] for line in lines] == [f"seed {seed}  epoch {e}/2  " for seed in (0, 1) for e in range(3)]
    assert all("valid loss 0." in line and "test accuracy " in line for line in (lines[2], lines[5]))
    assert lab("train", *arguments)[2] == ""  # nothing was trained


def test_a_field_given_twice_counts_once(tmp_path: Path) -> None:
    fields = ("--field", "width=0.5", "--field", "activation=relu", "--field", "width=2")
    assert lab("train", "digits", "--epochs", 0, *fields, "--out", tmp_path)[0] == 0
    (path,) = tmp_path.rglob("config.json")
    assert json.loads(path.read_text())["fields"] == {"activation": "relu", "width": 2.0}
    assert path.parent.parent.name.endswith("-activation=relu-width=2.0")


def test_the_recorded_command_repeats_a_run_of_sgd(tmp_path: Path) -> None:
    assert lab("train", "digits", "--optimizer", "SGD", "--epochs", 0, "--out", tmp_path)[0] == 0
    (path,) = tmp_path.rglob("config.json")
    assert lab("train", *json.loads(path.read_text())["command"].split()[2:], "--out", tmp_path)[::2] == (0, "")


def test_what_train_accepts_a_report_reads(tmp_path: Path) -> None:
    largest = ("--seed", MOST, "--lr", 9e99)
    assert lab("train", "digits", *largest, "--epochs", 0, "--out", tmp_path)[0] == 0
    found = collect([tmp_path])
    assert not found.left_out and found.experiments[0].series[0].seeds == (MOST,)


def test_threads_are_set_as_asked(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        assert lab("train", "digits", "--epochs", 0, "--threads", 2, "--out", tmp_path)[0] == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
