"""The loop: repeatable bit for bit, also after a kill; what stops it; what is kept; two processes as one."""

from __future__ import annotations

import errno
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import spawn

from hesscale_lab import batches, files, training
from hesscale_lab.files import InUseError, alone
from hesscale_lab.histories import is_finished
from hesscale_lab.plugins import Plugin
from hesscale_lab.processes import Team
from hesscale_lab.runs import CHECKPOINT, DamagedRunError, OtherRunError, Run, load_state
from hesscale_lab.settings import Settings, folder_of
from hesscale_lab.training import train, trained_model

from ..processes import together

SMALL = Settings("digits", "AdaHesScale", 0.01, 0.9, 0.999, seed=0, epochs=2, subset=96)


def measured(run: Run) -> list[dict[str, Any]]:
    """The records without the time they took."""
    return [{key: value for key, value in record.items() if key != "seconds"} for record in run.records]


@pytest.mark.parametrize("name", ["AdaHesScale", "AdaGGNMC", "AdaHessian", "Adam"])
def test_the_same_seed_gives_the_same_run(name: str, tmp_path: Path) -> None:
    runs = []
    for noise in (1, 2):
        torch.manual_seed(noise)  # the global generator plays no part
        runs.append(measured(train(replace(SMALL, optimizer=name), tmp_path / str(noise))))
    assert runs[0] == runs[1]
    other = measured(train(replace(SMALL, optimizer=name, seed=1), tmp_path / "other"))
    assert other[-2]["test_loss"] != runs[0][-2]["test_loss"]


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    seen: list[Any] = []
    run = train(SMALL, tmp_path, watch=seen.append)
    *epochs, end = run.records
    assert [record["epoch"] for record in epochs] == [0, 1, 2]
    assert [record["steps"] for record in epochs] == [0, 3, 6]
    assert all(0 < record[f"{part}_loss"] < 4 for record in epochs for part in ("train", "valid", "test"))
    assert all(0 <= record[f"{part}_accuracy"] <= 1 for record in epochs for part in ("train", "valid", "test"))
    assert epochs[0]["seconds"] == 0 < epochs[1]["seconds"] < epochs[2]["seconds"]
    assert end == {"kind": "end", "reason": "finished", "epoch": 2, "step": 6}
    files = {"config.json", "environment.json", "metrics.jsonl", "weights.pt"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert run.config["processes"] == 1
    assert run.config["command"] == (
        "hesscale train digits --optimizer AdaHesScale --lr 0.01 --beta1 0.9 --beta2 0.999 "
        "--seed 0 --epochs 2 --subset 96"
    )
    assert {"epoch", "step", "steps_per_epoch", "loss", "accuracy", "seconds_per_step"} <= set(seen[-1])
    assert (seen[-1]["epoch"], seen[-1]["step"], seen[-1]["steps_per_epoch"]) == (2, 3, 3)


def test_a_finished_run_returns_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = measured(train(SMALL, tmp_path))
    (tmp_path / CHECKPOINT).write_text("left by a kill before it was deleted")
    monkeypatch.setattr(training, "load_data", lambda *more, **options: pytest.fail("nothing needs to be read"))
    assert measured(train(SMALL, tmp_path)) == before
    assert not (tmp_path / CHECKPOINT).exists()
    with pytest.raises(OtherRunError, match="holds a run with other"):
        train(replace(SMALL, lr=0.02), tmp_path)


def test_losses_include_the_l2_term_and_curvature_does_not(tmp_path: Path) -> None:
    plain, decayed = (
        train(replace(SMALL, epochs=0, fields=fields), tmp_path / str(len(fields))).records[0]
        for fields in ((), (("weight_decay", 0.1),))
    )
    model = training.task_named("digits").make(batches.generator_for(0, "weights"))
    squares = sum(float(p.detach().double().square().sum()) for p in model.parameters() if p.dim() > 1)
    assert decayed["test_loss"] - plain["test_loss"] == pytest.approx(0.05 * squares)


SLOW = """
import sys, time
from pathlib import Path
import torch
from hesscale_lab.settings import Settings
from hesscale_lab.training import train
torch.set_num_threads(1)  # as here: matrix products of torch round differently on two
train(Settings(*eval(sys.argv[1])), Path(sys.argv[2]), watch=lambda progress: time.sleep(0.3))
"""


OPTIONS = (("bound", 1.0), ("every", 4), ("rank", 1), ("trust_region", 0.1))


@pytest.mark.parametrize(
    "settings",
    [replace(SMALL, optimizer="AdaGGNMC", epochs=4), replace(SMALL, epochs=4, options=OPTIONS)],
    ids=lambda settings: settings.optimizer,
)
def test_a_killed_run_goes_on_to_the_same_numbers(settings: Settings, tmp_path: Path) -> None:
    values = repr(tuple(vars(settings).values()))
    process = subprocess.Popen([sys.executable, "-c", SLOW, values, str(tmp_path / "killed")])
    while process.poll() is None and len(Run(tmp_path / "killed").records) < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed = Run(tmp_path / "killed")
    assert len(killed.records) >= 3 and not is_finished(killed)
    with (killed.folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epoch": 4, "test_loss": 0}\n{"kind": "ep')  # after the checkpoint; half a line
    assert measured(train(settings, killed.folder)) == measured(train(settings, tmp_path / "whole"))


def test_a_value_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD runs into it in the loss; the template refuses the step."""
    run = train(replace(SMALL, optimizer="SGD", lr=1e38), tmp_path / "SGD")
    assert run.records[-1]["kind"] == "end" and run.records[-1]["reason"] == "not finite"
    assert (run.records[-1]["epoch"], len(run.records)) == (1, 2)
    assert is_finished(run) and not (run.folder / CHECKPOINT).exists()

    def poisoned(optimizer: torch.optim.Optimizer, loss: Tensor, **more: Any) -> None:
        backward(optimizer, loss, **more)
        optimizer.param_groups[0]["params"][0].grad.fill_(math.nan)

    backward = training.backward
    monkeypatch.setattr(training, "backward", poisoned)
    run = train(SMALL, tmp_path / "AdaHesScale")
    assert run.records[-1] == {"kind": "end", "reason": "not finite", "epoch": 1, "step": 0}


def writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run puts on the disk, in order."""
    made: list[str] = []
    write = files._write

    def noted(path: Path, mode: str, content: bytes) -> None:
        made.append(path.name.removesuffix(".new"))
        write(path, mode, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write", noted)
        train(SMALL, folder)
    return made


def test_a_line_is_on_the_disk_before_the_checkpoint_that_implies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writes(tmp_path, monkeypatch) == [
        *("environment.json", "config.json", "metrics.jsonl"),
        *("metrics.jsonl", "checkpoint.pt") * 2,
        *("weights.pt", "metrics.jsonl"),
    ]


@pytest.mark.parametrize("place", range(9))
def test_a_full_disk_loses_nothing(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write it is that fails."""
    done = []
    write = files._write

    def full(path: Path, mode: str, content: bytes) -> None:
        done.append(path)
        write(path, mode, content[: len(content) // 2] if len(done) == place + 1 else content)
        if len(done) == place + 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        train(SMALL, tmp_path / "full")
    assert not list((tmp_path / "full").glob("*.new"))
    assert not is_finished(Run(tmp_path / "full")) if place > 1 else True
    assert measured(train(SMALL, tmp_path / "full")) == measured(train(SMALL, tmp_path / "whole"))


def interrupted(folder: Path, *, after: int) -> Run:
    """A run that was stopped after this epoch."""

    def stop(record: Mapping[str, Any]) -> None:
        if record["epoch"] == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(replace(SMALL, epochs=4), folder, each_epoch=stop)
    return Run(folder)


HARM: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a line is missing": lambda lines: [lines[0], *lines[2:]],
    "the end is cut off": lambda lines: [*lines[:-1], lines[-1][:-150]],
    "all is gone": lambda lines: [],
    "a line is garbage": lambda lines: [lines[0], b"\xff\x00garbage\n", *lines[2:]],
    "a line is a number": lambda lines: [b"5\n", *lines[1:]],
    "a line says nothing": lambda lines: [b'{"kind": "epoch", "epoch": 0}\n', *lines[1:]],
}


@pytest.mark.parametrize("harm", HARM)
def test_what_was_measured_survives_in_the_checkpoint(harm: str, tmp_path: Path) -> None:
    run = interrupted(tmp_path / "harmed", after=2)
    path = run.folder / "metrics.jsonl"
    path.write_bytes(b"".join(HARM[harm](path.read_bytes().splitlines(keepends=True))))
    again = train(replace(SMALL, epochs=4), run.folder)
    assert measured(again) == measured(train(replace(SMALL, epochs=4), tmp_path / "whole"))
    assert is_finished(again)


def test_a_finished_run_with_a_hole_is_not_finished(tmp_path: Path) -> None:
    run = train(SMALL, tmp_path)
    before, path = measured(run), tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for kept in ([*lines[:1], *lines[2:]], lines[1:], [*lines[:2], lines[-1]]):
        path.write_text("".join(kept))
        assert not is_finished(run)
        assert measured(train(SMALL, tmp_path)) == before


@pytest.mark.parametrize("line", ["garbage", '{"kind": "epoch", "epoch": 1}', "[]", ""])
def test_a_line_that_is_no_measurement_is_named(line: str, tmp_path: Path) -> None:
    train(SMALL, tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    with pytest.raises(DamagedRunError, match=rf"^{path}, line 2, is damaged: mend it, or delete the file"):
        train(SMALL, tmp_path)
    path.unlink()  # as it says
    assert is_finished(train(SMALL, tmp_path))


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    train(SMALL, tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DamagedRunError, match=r"config\.json is damaged: delete it"):
        train(SMALL, tmp_path)
    (tmp_path / "config.json").unlink()
    assert is_finished(train(SMALL, tmp_path))


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    run = interrupted(tmp_path, after=2)
    path = tmp_path / CHECKPOINT
    state, whole = load_state(path), path.read_bytes()
    assert state is not None
    foreign = [
        {"model": {}, "optimizer": {}},
        [1, 2],
        {**state, "config": {**state["config"], "lr": 1.0}},
        {**state, "model": {"weight": torch.ones(2)}},
        {name: value for name, value in state.items() if name != "steps"},
        {**state, "optimizer": {}},
    ]
    before = run.records
    flipped = whole.replace(next(iter(state["model"].values())).numpy().tobytes()[:8], b"8 bytes.")
    assert flipped != whole
    for content in (b"PK half of it", b"", whole[: len(whole) // 2], flipped, *foreign):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(DamagedRunError, match=r"checkpoint\.pt is damaged, or of another run: delete it to train"):
            train(replace(SMALL, epochs=4), tmp_path)
        assert run.records == before
    path.write_bytes(whole)
    assert is_finished(train(replace(SMALL, epochs=4), tmp_path))


def test_two_trainings_in_one_folder_are_refused(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(InUseError, match=f"works in {tmp_path}: wait for its end, or stop it"):
        train(SMALL, tmp_path)
    assert not list(tmp_path.iterdir())
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: train(SMALL, tmp_path, wait=True), range(2)))
    assert [record["epoch"] for record in runs[0].records] == [0, 1, 2, 2]


def test_the_final_weights_can_be_loaded(tmp_path: Path) -> None:
    settings = replace(SMALL, fields=(("activation", "relu"), ("width", 0.5)))
    run = train(settings, tmp_path)
    model = trained_model(tmp_path)
    data = batches.load(training.task_named("digits"), seed=0, subset=96)
    images, labels = data.test
    full = len(labels) // 32 * 32
    right = (model(data.task.prepare(images[:full])).argmax(1) == labels[:full]).double().mean()
    assert float(right) == pytest.approx(run.records[-2]["test_accuracy"])
    broken = train(replace(SMALL, optimizer="SGD", lr=1e38), tmp_path / "broken")
    with pytest.raises(FileNotFoundError, match=r"weights\.pt is not there"):
        trained_model(broken.folder)


def test_the_command_can_be_given_to_a_shell() -> None:
    settings = replace(SMALL, fields=(("text", "my text.txt"),), plugin=Plugin("my task.py", ""))
    words = shlex.split(settings.as_config()["command"])
    assert words[-4:] == ["--plugin", "my task.py", "--field", "text=my text.txt"]


def test_a_run_whose_command_was_written_otherwise_goes_on(tmp_path: Path) -> None:
    run = interrupted(tmp_path, after=1)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    state["config"]["command"] = "as it was"
    torch.save(state, tmp_path / "checkpoint.pt")
    (tmp_path / "config.json").write_text(json.dumps(state["config"]))
    assert train(replace(SMALL, epochs=4), tmp_path).records[-1]["reason"] == "finished"
    assert run.config["command"] == "as it was"


def test_everything_that_differs_changes_the_folder() -> None:
    root = Path("root")
    first = Settings("mnist-mlp", "AdaHesScale", 1e-4, 0.0, 0.9999, seed=0, epochs=20)
    assert folder_of(first, root) == root / "mnist-mlp/AdaHesScale/lr1e-04-b0-b0.9999-e20/seed0"
    others = [
        replace(first, task="digits"),
        replace(first, optimizer="Adam"),
        replace(first, lr=1.04e-4),
        replace(first, beta1=0.9),
        replace(first, beta2=0.99990000001),
        replace(first, seed=1),
        replace(first, epochs=2),
        replace(first, subset=5000),
        replace(first, fields=(("activation", "relu"),)),
        replace(first, processes=2),
    ]
    assert len({folder_of(settings, root) for settings in (first, *others)}) == 11


def cannot() -> None:
    raise OSError("the first process cannot")


def in_two_processes(rank: int, folder: Path) -> None:
    with together(rank, folder / "meeting"):
        with pytest.raises(ValueError, match="for 1 processes, not 2"):
            train(SMALL, folder / "two")
        train(replace(SMALL, processes=2), folder / "two")
        with pytest.raises(OSError, match="the first process cannot"):
            Team.current().share(cannot)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    spawn(in_two_processes, (tmp_path,), nprocs=2)
    two, one = measured(Run(tmp_path / "two")), measured(train(SMALL, tmp_path / "one"))
    assert two[-1] == one[-1]
    config = Run(tmp_path / "two").config
    assert config["processes"] == 2
    assert config["command"].startswith("torchrun --nproc-per-node 2 -m hesscale_lab.cli train digits --optimizer")
    with pytest.raises(OtherRunError, match="other processes: choose"):
        train(SMALL, tmp_path / "two")
    for a, b in zip(two[:-1], one[:-1], strict=True):
        assert [*a.values()][1:] == pytest.approx([*b.values()][1:], rel=1e-4)
