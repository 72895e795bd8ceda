"""Every study: at a tiny size, from the committed results, and as a command that goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hesscale_lab.files import alone
from hesscale_lab.runs import Run
from hesscale_lab.studies import applications, continual, cost_timing, pruning, quality
from hesscale_lab.studies.quality import authors_seeds
from hesscale_lab.studies.study import read
from hesscale_lab.studies.table import STUDIES, WITH_OPTIONS
from hesscale_lab.tasks import cost_networks
from hesscale_lab.tasks.cost_networks import Workload
from hesscale_lab.wording import csv_text

from ..command import lab
from ..small_archives import write_cifar, write_mnist

RESULTS = Path(__file__).parents[3] / "results"
QUICK = ("quality", "--quick", "--seeds", 2, "--examples", 2)
TINY: dict[str, dict[str, Any]] = {
    "quality": {"seeds": [1], "examples": 2, "rounds": 1},
    "cost": {"rounds": 2, "asked": ["headline"], "optimizers": ["Adam", "Adam fused", "AdaHesScale", "exact GGN"]},
    "stability": {"networks": ["MLP 2×32, ReLU"]},
    "pruning": {"subjects": ["mlp-tanh", "cnn"], "seeds": [0], "saliencies": ["magnitude", "HesScale, h < 0 as 0"]},
    "continual": {
        "methods": ["none", "L2", "EWC, HesScale"],
        "strengths": {name: [0.1, 1.0] for name in continual.BENCHMARKS},
        "seeds": [0, 1],
        **{"train": 6, "epochs": 1, "curvature": 6, "measured": 4},
    },
    "reinforcement": {"optimizers": ["Adam", "AdaHesScale"], "seeds": 1, "steps": 1024},
    "laplace": {"diagonals": ["HesScaleGN", "GGN"], "trained": 40, "epochs": 1, "curvature": 40, "tested": 20},
}
FIGURES = {"quality": ["quality", "time"], "cost": ["cost", "cost-without-forward", "cost-relative"]}
FIGURES |= {name: [name] for name in ("pruning", "continual", "reinforcement")}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small images and small networks."""
    write_mnist(tmp_path, 60)
    write_cifar(tmp_path, 20, classes=10)
    tiny = {"train": 40, "epochs": 1, "curvature": 20, "test": 40, "removed": 6, "steps": 1, "sparsities": (0.5, 0.9)}
    subjects = {name: dataclasses.replace(row, **tiny) for name, row in pruning.SUBJECTS.items()}
    monkeypatch.setattr(pruning, "SUBJECTS", subjects)
    make, inputs = (lambda: torch.nn.Linear(3, 2)), (lambda count: torch.ones(count, 3))
    workload = Workload("layers", "1 layer", 1, make, inputs, classes=2, quick=True, headline=True)
    monkeypatch.setattr(cost_networks, "CELLS", (workload,))
    monkeypatch.setattr(cost_timing, "_PIECE", 1e-9)
    applications.images_of.cache_clear()
    return tmp_path


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_measures_what_its_tables_and_figures_need(name: str, data: Path) -> None:
    study = STUDIES[name]
    config = json.loads(json.dumps({"title": "tiny", **study.settings(True), **TINY[name]}))
    (data / "run").mkdir()
    records: list[Any] = []
    for cell in study.cells(config)[:3]:
        state = torch.get_rng_state()
        measured = [*study.measure(cell, config, data=data, folder=data / "run")]
        assert torch.equal(torch.get_rng_state(), state)
        assert measured and {tuple(record.get(key) for key in study.keys) for record in measured} == {cell}
        records += json.loads(json.dumps(measured))
    assert all(study.checks[record["kind"]](record) for record in records)
    assert not any(study.checks[record["kind"]](dict.fromkeys(record)) for record in records)
    assert [*study.tables(config, records)] and not [*study.tables(config, [])]
    assert [*study.rows(records)]
    assert [plot.name for plot in study.figures(config, records)] == FIGURES.get(name, [])
    assert not [*study.figures(config, [])]


@pytest.mark.parametrize("name", STUDIES)
def test_the_command_would_not_measure_committed_results_again(name: str) -> None:
    study = STUDIES[name]
    folders = [path.parent for path in RESULTS.rglob("config.json") if Run(path.parent).config["kind"] == name]
    assert folders
    for folder in folders:
        config, reading = Run(folder).config, read(Run(folder), study.checks)
        assert not reading.left_out
        known = {tuple(record.get(key) for key in study.keys) for record in reading.records}
        assert known <= {*study.cells(config)} or name == "cost"  # of which some optimizers and cells have new names
        if name not in WITH_OPTIONS:
            assert {*study.settings(False), "kind", "command", "title"} == {*config}
            assert csv_text(study.rows(reading.records)) == (folder / f"{name}.csv").read_text()


@pytest.fixture
def small_reinforcement(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**STUDIES["reinforcement"].settings(True), **TINY["reinforcement"]}
    row = dataclasses.replace(STUDIES["reinforcement"], settings=lambda quick: small)
    monkeypatch.setitem(STUDIES, "reinforcement", row)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_reinforcement")
def test_the_command_prints_draws_and_goes_on(tmp_path: Path) -> None:
    arguments = ("study", "reinforcement", "--quick", "--out", tmp_path)
    code, printed, said = lab(*arguments)
    assert (code, said) == (0, "")
    assert "CartPole, PPO: mean return by step size" in printed
    assert json.loads((tmp_path / "config.json").read_text())["kind"] == "reinforcement"
    assert (tmp_path / "reinforcement.png").read_bytes().startswith(b"\x89PNG")
    path, table = tmp_path / "metrics.jsonl", (tmp_path / "reinforcement.csv").read_text()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], lines[6][:40]]))  # as if killed after Adam, while writing
    assert lab(*arguments)[0] == 0
    assert path.read_text().splitlines() == lines
    assert (tmp_path / "reinforcement.csv").read_text() == table


def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds."""
    monkeypatch.setattr("hesscale_lab.cli.study.draw", lambda run, row, records: None)


def test_quality_prints_tables_and_writes_a_run(tmp_path: Path) -> None:
    out = tmp_path / "new" / "quality"
    code, printed, _ = lab(*QUICK, "--out", out)
    assert code == 0
    config, environment = (json.loads((out / name).read_text()) for name in ("config.json", "environment.json"))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert config["command"] == "hesscale quality --network paper --seeds 2 --examples 2 --updates 0 --quick"
    assert environment["torch"] == str(torch.__version__)
    assert [record["seed"] for record in records if record["kind"] == "quality"] == config["seeds"] == authors_seeds(2)
    assert all(method in printed for method in records[0]["errors"])
    for name in ("quality", "time"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text()[:1000]


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = quality._errors_at_once
    asked: list[int] = []

    def interrupted(model: object, x: object, y: object, draws: torch.Generator) -> object:
        asked.append(draws.initial_seed())
        if len(asked) == 2:
            raise KeyboardInterrupt
        return errors(model, x, y, draws)  # type: ignore[arg-type]

    monkeypatch.setattr(quality, "_errors_at_once", interrupted)
    without_figures(monkeypatch)
    code, _, said = lab(*QUICK, "--out", tmp_path)
    assert code == 130 and "the same command goes on" in said
    first = (tmp_path / "metrics.jsonl").read_text()
    for _ in range(2):
        assert lab(*QUICK, "--out", tmp_path)[0] == 0
        assert (tmp_path / "metrics.jsonl").read_text().startswith(first)
    assert asked == [*authors_seeds(2), authors_seeds(2)[1]]
    code, _, said = lab("quality", "--quick", "--seeds", 2, "--examples", 3, "--out", tmp_path)
    assert code == 2 and "holds a run with other command, examples: choose another --out" in said


@pytest.mark.parametrize(
    "line", [b"garbage", b"\xff\xfe", b"[1, 2]", b'{"kind": "quality", "stage": "initial"}', b"1e999"]
)
def test_a_damaged_line_is_named_and_its_seed_measured_again(
    line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_figures(monkeypatch)
    code, whole, _ = lab(*QUICK, "--out", tmp_path)
    assert code == 0
    path = tmp_path / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([line, *others, b""]))
    said = f"hesscale: left out line 1 of {path}: not readable\n"
    assert lab(*QUICK, "--out", tmp_path) == (0, whole, said)
    assert path.read_bytes().splitlines()[-1] == first


@pytest.mark.parametrize("command", [("quality", "--quick"), ("cost", "--quick"), ("study", "stability")])
def test_a_folder_in_use_is_one_line_and_code_1(command: tuple[str, ...], tmp_path: Path) -> None:
    with alone(tmp_path):
        code, printed, said = lab(*command, "--out", tmp_path)
    assert (code, printed, said.count("\n")) == (1, "", 1)
    assert said.startswith("hesscale: process ") and f" works in {tmp_path}: wait for its end, or stop it" in said
    assert not list(tmp_path.iterdir())


def test_every_study_has_a_line_of_help() -> None:
    printed = " ".join(lab("study", "--help")[1].split())
    assert all(f"{name}: {row.summary[:20]}" in printed for name, row in STUDIES.items() if name not in WITH_OPTIONS)
    code, _, said = lab("study", "astrology")
    assert code == 2 and "stability" in said
