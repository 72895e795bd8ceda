"""Input that makes no sense is refused in one line, before anything is made."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hesscale_lab.tasks import download

from ..command import lab
from ..small_archives import write_mnist

BAD_INPUT = {
    "train foo": "unknown task 'foo': choose among digits, mnist-mlp",
    "train digits --optimizer Foo": "unknown optimizer 'Foo': choose among SGD, Adam",
    "train digits --field foo=1": "unknown field 'foo': choose among variant",
    "train digits --field activation": "a field is given as name=value",
    "train digits --field weight_decay=inf": "weight_decay must be a number from 0, not inf",
    "train digits --field width=inf": "width must be a positive number, not inf",
    "train digits --lr -1": "--lr must be above 0 and below 1e+100, not -1.0",
    "train digits --lr nan": "--lr must be above 0 and below 1e+100, not nan",
    "train digits --lr 1e100": "--lr must be above 0 and below 1e+100, not 1e+100",
    "train digits --beta2 1": "--beta2 must be at least 0 and below 1, not 1.0",
    "train digits --seed 1000000000": "--seed must be at most 999999999, not 1000000000",
    "train digits --epochs 1000000000": "--epochs must be at most 999999999, not 1000000000",
    "train digits --seeds 0": "--seeds must be at least 1, not 0",
    "train digits --seeds 2 --seed 1": "choose one of --seed and --seeds",
    "train digits --optimizer SGD --beta1 0.9": "beta1 does not go with SGD: leave --beta1 out",
    "train digits --optimizer SGD --beta2 0.9": "beta2 does not go with SGD: leave --beta2 out",
    "train digits --every 0": "--every must be a whole number of steps, 1 or more, not '0'",
    "train digits --every 1,10": "--every is one value here, not '1,10': hesscale sweep takes several",
    "train digits --eps x": "--eps must be a positive number, not 'x'",
    "train digits --bound nan": "--bound must be a positive number, or none for the paper's algorithm, not 'nan'",
    "train digits --trust-region -1": "--trust-region must be a positive number, or none, not '-1'",
    "train digits --rank all": "--rank must be a whole number of columns, 0 or more, or full, not 'all'",
    "train digits --optimizer Adam --rank 1": "Adam takes no rank: its options are eps",
    "train digits --optimizer SGD --eps 1": "SGD takes no eps: its options are none of these",
    "train digits --subset 5000": "there are 1200 training examples, not 5000",
    "sweep nothing": "unknown task 'nothing': choose among digits",
    "sweep digits --optimizers Adam,Foo": "unknown optimizer 'Foo': choose among SGD",
    "sweep digits --optimizers ,": "--optimizers names none",
    "sweep digits --optimizers Adam,SGD --rank 0,1": "rank does not go with Adam or SGD",
    "sweep digits --optimizers SGD --beta1s 0,0.9": "beta1s does not go with SGD: leave --beta1s out",
    "sweep digits --lrs a,b": "--lrs takes numbers with commas between them, not 'a,b'",
    "sweep digits --lrs 1e-3,inf": "--lrs must be above 0 and below 1e+100",
    "sweep digits --beta2s 1": "--beta2s must be at least 0 and below 1",
    "sweep digits --seeds 0": "--seeds must be at least 1",
    "sweep digits --seeds 1000000000": "--seeds must be at most 999999999",
    "sweep digits --threads 0": "--threads must be at least 1",
    "sweep digits --field activation=foo": "unknown activation 'foo': choose among",
    "sweep digits --every 1,x": "--every must be a whole number of steps, 1 or more, not 'x'",
    "quality --seeds -3": "--seeds must be at least 1, not -3",
    "quality --seeds 100000": "--seeds must be at most 99999, not 100000",
    "quality --updates -3": "--updates must be at least 0, not -3",
    "cost --rounds 0": "--rounds must be at least 1, not 0",
    "cost --optimizer AdaHeScale": "there is no optimizer 'AdaHeScale': choose one of 'SGD', 'Adam', ",
    "cost --compiled --only memory": "--compiled has optimizers and networks of its own: leave out --optimizer",
}


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_one_line_and_code_2(line: str, tmp_path: Path) -> None:
    code, printed, said = lab(*shlex.split(line), "--out", tmp_path / "runs")
    assert (code, printed, said.count("\n")) == (2, "", 1)
    assert said.startswith(f"hesscale: {BAD_INPUT[line]}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train digits", "quality", "report ."])
def test_a_folder_that_cannot_be_written_is_one_line_and_code_1(command: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    words = shlex.split(command.replace(" .", f" {Path(__file__).parents[3] / 'results' / 'laplace'}"))
    code, printed, said = lab(*words, "--out", tmp_path / "taken" / "run")
    assert (code, printed, said.count("\n")) == (1, "", 1)
    assert said.startswith("hesscale: cannot write to ")


def test_missing_data_is_one_line_and_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(url: str, **more: object) -> None:
        raise OSError("no network")

    monkeypatch.setenv("HESSCALE_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "_pooch", lambda: offline)
    write_mnist(tmp_path / "damaged", 3)
    (tmp_path / "damaged" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"\x1f\x8b")
    quality = ("quality", "--network", "mnist-relu")
    for arguments, complaint in (
        (("train", "mnist-mlp"), "cannot download MNIST (no network): run `mkdir -p data/MNIST/raw"),
        (("train", "mnist-mlp", "--data", tmp_path), f"{tmp_path / 'MNIST' / 'raw'}"),
        (("train", "mnist-mlp", "--data", tmp_path / "damaged"), f"{tmp_path / 'damaged'}"),
        (quality, "this network needs MNIST: point --data at a folder"),
        ((*quality, "--data", tmp_path), f"{tmp_path / 'MNIST' / 'raw'}"),
    ):
        code, _, said = lab(*arguments, "--out", tmp_path / "run")
        assert (code, said.count("\n")) == (1, 1)
        assert said.startswith(f"hesscale: {complaint}")


def test_coverage_outside_a_clone_says_where_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = "hesscale: there is no folder docs here: say where the page goes with --out FILE\n"
    assert lab("coverage") == (2, "", said)


def test_an_unknown_part_of_cost_is_refused() -> None:
    assert lab("cost", "--only", "everything")[0] == 2


@pytest.mark.parametrize("command", ["", "train", "quality", "cost"])
def test_help_shows_an_example(command: str) -> None:
    code, printed, _ = lab(*command.split(), "--help")
    assert code == 0 and f"hesscale {command or 'quality'} " in printed.split("Example")[1]
