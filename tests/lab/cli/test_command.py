"""The command: what it prints and writes, how it goes on after an interrupt, what it says when something is wrong."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hesscale_lab.cli import app, study
from hesscale_lab.startup import what_to_install
from hesscale_lab.studies import quality as quality_study

coverage = importlib.import_module("hesscale_lab.cli.coverage")  # the package has the command under that name
SMALL = ("--quick", "--seeds", 2, "--examples", 2)


def quality(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["quality", *map(str, arguments)], env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds."""
    monkeypatch.setattr(study, "draw", lambda run, row, records: None)


def test_it_prints_tables_and_writes_a_run(tmp_path: Path) -> None:
    out = tmp_path / "new" / "quality"
    code, printed, _ = quality(*SMALL, "--out", out)
    assert code == 0
    config, environment = (json.loads((out / name).read_text()) for name in ("config.json", "environment.json"))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert config["seeds"] == quality_study.authors_seeds(2)
    assert config["command"] == "hesscale quality --network paper --seeds 2 --examples 2 --updates 0 --quick"
    assert environment["torch"] == str(torch.__version__)
    assert [record["seed"] for record in records if record["kind"] == "quality"] == config["seeds"]
    assert all(method in printed for method in records[0]["errors"])
    for name in ("quality", "time"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text()[:1000]


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = quality_study._errors_at_once
    asked: list[int] = []

    def interrupted(model: object, x: object, y: object, draws: object) -> object:
        asked.append(draws.initial_seed())  # type: ignore[attr-defined]
        if len(asked) == 2:
            raise KeyboardInterrupt
        return errors(model, x, y, draws)  # type: ignore[arg-type]

    monkeypatch.setattr(quality_study, "_errors_at_once", interrupted)
    without_figures(monkeypatch)
    code, _, complaint = quality(*SMALL, "--out", tmp_path)
    assert code == 130
    assert "the same command goes on" in complaint
    first = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(first + first[:40])  # as if the interrupt had come while writing
    assert quality(*SMALL, "--out", tmp_path)[0] == 0
    seeds = quality_study.authors_seeds(2)
    assert asked == [*seeds, seeds[1]]
    finished = (tmp_path / "metrics.jsonl").read_text()
    assert finished.startswith(first)
    assert quality(*SMALL, "--out", tmp_path)[0] == 0
    assert (tmp_path / "metrics.jsonl").read_text() == finished


def test_a_folder_with_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_figures(monkeypatch)
    assert quality(*SMALL, "--out", tmp_path)[0] == 0
    code, _, complaint = quality("--quick", "--seeds", 2, "--examples", 3, "--out", tmp_path)
    assert code == 2
    assert "holds a run with other command, examples: choose another --out" in complaint


@pytest.mark.parametrize("option, least", [("--seeds", 1), ("--examples", 1), ("--updates", 0)])
def test_a_count_too_low_is_one_line_and_code_2(option: str, least: int, tmp_path: Path) -> None:
    code, _, complaint = quality(option, -3, "--out", tmp_path)
    assert code == 2
    assert complaint == f"hesscale: {option} must be at least {least}, not -3\n"


def test_a_folder_that_cannot_be_written_is_one_line_and_code_1(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    code, printed, complaint = quality("--out", tmp_path / "taken" / "quality")
    assert code == 1
    assert printed == ""
    assert complaint.startswith("hesscale: cannot write to ")
    assert complaint.count("\n") == 1


def test_missing_data_is_one_line_and_code_1(tmp_path: Path) -> None:
    for more in ((), ("--data", tmp_path)):
        code, _, complaint = quality("--network", "mnist-relu", *more, "--out", tmp_path / "run")
        assert code == 1
        assert "point --data at a folder" in complaint
        assert complaint.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["quality"]])
def test_help_shows_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "hesscale quality --quick" in result.stdout


@pytest.mark.parametrize(
    "line", [b"garbage", b"\xff\xfe", b"[1, 2]", b'{"kind": "quality", "stage": "initial"}', b"1e999"]
)
def test_a_damaged_line_is_named_and_its_seed_measured_again(
    line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_figures(monkeypatch)
    code, whole, _ = quality(*SMALL, "--out", tmp_path)
    assert code == 0
    path = tmp_path / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([line, *others, b""]))
    code, printed, complaint = quality(*SMALL, "--out", tmp_path)
    assert code == 0
    assert complaint.strip() == f"hesscale: left out line 1 of {path}: not readable"  # a bar leaves an empty line
    assert path.read_bytes().splitlines()[-1] == first
    assert printed == whole


@pytest.mark.parametrize("missing", ["typer", "rich", "matplotlib"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from hesscale_lab.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "quality", "--help"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"hesscale: this needs {missing}: pip install 'hesscale[lab]'\n"


def test_the_installed_command_is_the_one_that_says_it() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"hesscale": "hesscale_lab.__main__:main"}
    imported_as = {"scikit-learn": "sklearn", "pillow": "PIL"}
    wanted = [re.split("[<>=]", one)[0] for one in project["optional-dependencies"]["lab"]]
    for module in (imported_as.get(name, name) for name in wanted):
        assert what_to_install(ModuleNotFoundError(name=f"{module}.part")).endswith("pip install 'hesscale[lab]'")
    assert what_to_install(ModuleNotFoundError(name="scipy")) == "this needs scipy: pip install scipy"
    with pytest.raises(ModuleNotFoundError):  # a mistake of ours is not to be installed away
        what_to_install(ModuleNotFoundError(name="hesscale_lab.nothing"))


def test_coverage_outside_a_clone_says_where_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(coverage, "measure", lambda: pytest.fail("measured in vain"))
    result = CliRunner().invoke(app, ["coverage"])
    assert result.exit_code == 2
    assert result.stderr == "hesscale: there is no folder docs here: say where the page goes with --out FILE\n"
