"""Tasks and optimizers from a user's file: the documents' example runs, also in workers; a bad file is one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from hesscale_lab.optimizers import OPTIMIZERS
from hesscale_lab.plugins import PluginError, read_plugin
from hesscale_lab.runs import Run
from hesscale_lab.settings import Settings, settings_of
from hesscale_lab.tasks.table import TASKS
from hesscale_lab.training import trained_model
from hesscale_lab.workers import run_all

from .command import lab

DOCUMENT = Path(__file__).parents[2] / "docs" / "experiments.md"


_SPEC = "from hesscale_lab.optimizers import OptimizerSpec\n"


@pytest.fixture(autouse=True)
def tables_as_they_were() -> object:
    before = dict(TASKS), dict(OPTIMIZERS)
    yield
    for table, rows in zip((TASKS, OPTIMIZERS), before, strict=True):
        table.clear()
        table.update(rows)  # type: ignore[arg-type]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The example of the documents."""
    (example,) = re.findall(r"^```python\n(# my_task.py\n.*?)^```", DOCUMENT.read_text(), re.S | re.M)
    path = tmp_path / "my_task.py"
    path.write_text(example)
    return path


def test_the_example_trains_and_comes_back(plugin: Path, tmp_path: Path) -> None:
    options = ("--optimizer", "MeanAbs", "--lr", 0.02, "--every", 5, "--epochs", 3, "--field", "hidden=8")
    arguments = ("spirals", "--plugin", plugin, *options, "--out", tmp_path / "runs")
    code, printed, said = lab("train", *arguments)
    assert code == 0, said
    assert "spirals, MeanAbs every=5: lr 2e-2, β₁ 0.9, β₂ 0.999" in printed
    (path,) = (tmp_path / "runs").rglob("config.json")
    run = Run(path.parent)
    assert run.config["plugin"] == {"name": "my_task.py", "source": plugin.read_text()}
    assert "--plugin my_task.py" in run.config["command"]
    losses = [record["valid_loss"] for record in run.records[:-1]]
    assert losses[-1] < losses[0]
    assert lab("train", *arguments)[2] == ""  # finished
    TASKS.pop("spirals")
    plugin.unlink()
    assert trained_model(run.folder)(torch.zeros(1, 2)).shape == (1, 2)
    assert settings_of(run.config).as_config() == json.loads(json.dumps(run.config))


def test_a_changed_plugin_is_another_run(plugin: Path, tmp_path: Path) -> None:
    arguments = ("spirals", "--plugin", plugin, "--lr", 0.01, "--epochs", 0, "--out", tmp_path / "runs")
    assert lab("train", *arguments)[0] == 0
    plugin.write_text(plugin.read_text().replace("std=0.5", "std=0.1"))
    code, _, said = lab("train", *arguments)
    assert code == 2 and "holds a run with other plugin: choose another --out" in said


@pytest.mark.usefixtures("two_workers")
def test_workers_know_the_plugin_by_value(plugin: Path, tmp_path: Path) -> None:
    """A worker of Ray is another process, here without the file."""
    grid = ("--lrs", "1e-2", "--beta1s", "0.9", "--beta2s", "0.999", "--epochs", 1, "--seeds", 1, "--workers", 1)
    arguments = ("spirals", "--plugin", plugin, "--optimizers", "NAdam,AdaHesScale", *grid)
    code, printed, said = lab("sweep", *arguments, "--out", tmp_path / "runs")
    assert code == 0, said
    assert "NAdam" in printed
    (path,) = (tmp_path / "runs" / "spirals" / "NAdam").rglob("config.json")
    settings = settings_of(Run(path.parent).config)
    plugin.unlink()
    (here,) = run_all([settings], tmp_path / "again", workers=1)
    assert here.has_ended
    losses = [[r.get("test_loss") for r in Run(folder).records] for folder in (path.parent, here.folder)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "source, complaint",
    [
        (None, "cannot read the plugin"),
        ("x = ", "cannot be loaded (SyntaxError: invalid syntax (my.py, line 1))"),
        ("raise KeyError('two\\nlines')", "cannot be loaded (KeyError: 'two\\nlines')"),
        ("import sys; sys.exit(3)", "cannot be loaded (SystemExit: 3)"),
        ("import nowhere_to_be_found", "cannot be loaded (ModuleNotFoundError: No module"),
        ("x = 1", "defines neither TASKS nor OPTIMIZERS"),
        ("TASKS = {'mine': 3}", "TASKS of the plugin my.py must be a dict of names and Tasks"),
        ("OPTIMIZERS = ['mine']", "OPTIMIZERS of the plugin my.py must be a dict of names and OptimizerSpecs"),
        (
            "from hesscale_lab.tasks.task import Task\nTASKS = {'half': Task('half', 1)}",
            "cannot be loaded (TypeError: Can't instantiate abstract class Task",
        ),
        (
            _SPEC + "OPTIMIZERS = {'Bad': OptimizerSpec(lambda groups, lr: None)}",
            "'Bad' in the plugin my.py cannot be made from groups, lr, betas and fused (got an unexpected keyword",
        ),
        (
            _SPEC + "OPTIMIZERS = {'None': OptimizerSpec(None)}",
            "'None' in the plugin my.py cannot be made from groups, lr, betas and fused (None is not a callable",
        ),
        (
            _SPEC + "OPTIMIZERS = {'Adam': OptimizerSpec(None)}",
            "'Adam' in the plugin my.py is there already: choose another name",
        ),
        (
            _SPEC + "OPTIMIZERS = {'../x': OptimizerSpec(None)}",
            "'../x' in the plugin my.py is no name: take letters, digits, - and _",
        ),
    ],
)
def test_a_bad_plugin_is_one_sentence(source: str | None, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    if source is not None:
        path.write_text(source)
    before = list(TASKS), list(OPTIMIZERS)
    for function in ("train", "sweep"):
        code, printed, said = lab(function, "digits", "--plugin", path, "--out", tmp_path / "runs")
        assert (code, printed) == (2, "")
        assert complaint in said and said.startswith("hesscale: ") and said.count("\n") == 1
    assert (list(TASKS), list(OPTIMIZERS)) == before
    assert not (tmp_path / "runs").exists()


FAILING = """
import torch
from hesscale_lab.optimizers import OptimizerSpec


class Unready(torch.optim.SGD):
    def __init__(self, groups, lr, betas, fused):
        raise RuntimeError("not\\nready")


class Stumbling(torch.optim.SGD):
    def __init__(self, groups, lr, betas, fused):
        super().__init__(groups, lr=lr)

    def step(self):
        raise ValueError("it stumbled")


OPTIMIZERS = {"Unready": OptimizerSpec(Unready), "Stumbling": OptimizerSpec(Stumbling)}
"""


@pytest.mark.parametrize(
    "name, reason", [("Unready", "RuntimeError: not ready"), ("Stumbling", "ValueError: it stumbled")]
)
@pytest.mark.usefixtures("two_workers")
def test_an_error_of_a_plugin_is_told_as_its_own(name: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    options = ("--lr", 0.1, "--epochs", 1, "--subset", 64)
    arguments = ("digits", "--plugin", path, "--optimizer", name, *options, "--out", tmp_path / "runs")
    code, _, said = lab("train", *arguments)
    first = next(place for place, line in enumerate(said.splitlines()) if line.startswith("hesscale: "))
    assert code == 1
    assert said.splitlines()[first : first + 2] == [
        f"hesscale: the plugin failing.py failed ({reason}):",
        "Traceback (most recent call last):",
    ]
    assert f'File "failing.py", line {8 if name == "Unready" else 16}, in ' in said
    settings = Settings("digits", name, 0.1, 0.0, 0.0, seed=0, epochs=1, plugin=read_plugin(path))
    (there,) = run_all([settings], tmp_path / "workers", workers=1)
    assert there.error == f"the plugin failing.py failed ({reason})"


def test_nothing_of_a_plugin_is_taken_if_a_part_of_it_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    task = "from hesscale_lab.tasks.text import TextTask\nTASKS = {'mine': TextTask('mine', 1)}\n"
    path.write_text(f"{task}OPTIMIZERS = {{'mine': 1}}")
    with pytest.raises(PluginError, match="must be a dict of names and OptimizerSpecs"):
        read_plugin(path)
    assert "mine" not in TASKS


@pytest.mark.parametrize("name, words", [("SGD", "lr 1e-1"), ("AdaHesScale", "lr 1e-1, β₁ 0.9, β₂ 0.999")])
def test_what_nobody_tuned_needs_a_step_size(name: str, words: str, plugin: Path, tmp_path: Path) -> None:
    arguments = ("spirals", "--plugin", plugin, "--optimizer", name, "--epochs", 0, "--out", tmp_path / "runs")
    code, _, said = lab("train", *arguments)
    assert code == 2
    assert said.startswith(f"hesscale: nobody has tuned {name} on spirals: give --lr") and said.count("\n") == 1
    code, printed, _ = lab("train", *arguments, "--lr", 0.1)
    assert code == 0 and words in printed
