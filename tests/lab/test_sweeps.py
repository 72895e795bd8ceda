"""Sweeps: what is tried, what is chosen, and that runs survive their workers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hesscale_lab import workers
from hesscale_lab.histories import State, read_history
from hesscale_lab.options import combinations
from hesscale_lab.settings import Settings, folder_of, settings_of
from hesscale_lab.sweeps import area, choose, grid, repeats, sweep
from hesscale_lab.workers import Progress, Status, WorkersError, cluster, progress_of, run_all

from .command import lab
from .made_up_runs import ADAM, cut_off, make_run, make_seeds


def test_the_grid_is_the_papers() -> None:
    adam = grid("mnist-mlp", "Adam", epochs=100)
    assert len(adam) == 5 * 2 * 3
    assert {(s.lr, s.beta1, s.beta2) for s in adam} >= {(1e-5, 0.0, 0.99), (1e-1, 0.9, 0.9999)}
    assert {s.lr for s in grid("mnist-mlp", "AdaBL89", epochs=1)} >= {1e-6}
    assert {(s.beta1, s.beta2) for s in grid("cifar100-3c3d", "Adam", epochs=1)} == {(0.9, 0.999)}


def test_sgd_has_no_betas_to_search() -> None:
    settings = grid("mnist-mlp", "SGD", epochs=1)
    assert [(s.lr, s.beta1, s.beta2) for s in settings] == [(10.0**e, 0.0, 0.0) for e in range(-5, 0)]


def test_values_can_be_given() -> None:
    settings = grid("digits", "Adam", epochs=2, lrs=[0.1], beta1s=[0.5], beta2s=[0.9, 0.9], subset=64, seed=7)
    assert settings == [Settings("digits", "Adam", 0.1, 0.5, 0.9, seed=7, epochs=2, subset=64)]


def test_every_combination_of_options_is_tried_with_who_takes_them() -> None:
    options = combinations({"every": "1,10", "bound": "none,1", "rank": None})
    assert options == [(), (("bound", 1.0),), (("every", 10),), (("bound", 1.0), ("every", 10))]
    labels = {s.label for s in grid("digits", "AdaHesScale", epochs=2, lrs=[0.1, 0.2], options=options)}
    names = ("AdaHesScale", "AdaHesScale bound=1", "AdaHesScale every=10", "AdaHesScale bound=1 every=10")
    assert labels == set(names)
    adam = grid("digits", "Adam", epochs=2, lrs=[0.1], beta1s=[0], beta2s=[0.9], options=options)
    assert adam == [Settings("digits", "Adam", 0.1, 0.0, 0.9, seed=0, epochs=2)]


def test_an_optimizer_with_other_options_is_chosen_for_by_itself(tmp_path: Path) -> None:
    plain = replace(ADAM, optimizer="AdaHesScale")
    lazy = replace(plain, options=(("every", 10),))
    for settings, last in ((plain, 1.0), (replace(plain, lr=1.0), 2.0), (lazy, 2.0), (replace(lazy, lr=1.0), 1.5)):
        make_run(tmp_path, settings, [2, 1, 1, last])
    asked = [*(replace(one, lr=lr) for one in (plain, lazy) for lr in (1e-3, 1.0))]
    found = sweep(asked, seeds=1, run=lambda wanted: [progress_of(one, folder_of(one, tmp_path)) for one in wanted])
    assert found.chosen == {"AdaHesScale": plain, "AdaHesScale every=10": replace(lazy, lr=1.0)}


def test_the_area_is_the_sum_over_epochs(tmp_path: Path) -> None:
    run = make_run(tmp_path, ADAM, [2.0, 1.0, 0.5, 0.25])
    assert area(run) == 3.75


@pytest.mark.parametrize("losses", [[2.0, 1.0], [2.0, 1.0, math.nan], [2.0, 1.0, math.inf, 0.5]])
def test_a_run_that_broke_goes_on_with_its_first_loss(losses: list[float], tmp_path: Path) -> None:
    run = make_run(tmp_path, ADAM, losses, end="not finite")
    assert area(run) == 2.0 + 1.0 + 2.0 + 2.0


def test_an_unfinished_run_has_no_area(tmp_path: Path) -> None:
    run = make_run(tmp_path, ADAM, [2.0, 1.0], end=None)
    cut_off(run)
    with pytest.raises(ValueError, match="has not ended"):
        area(run)


@pytest.mark.parametrize("end, epoch", [("finished", 3), ("not finite", 3)])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_run_with_a_hole_is_computed_again_and_not_chosen(end: str, epoch: int, lost: int, tmp_path: Path) -> None:
    """Without the epochs that are missing its area would be the smallest."""
    run = make_run(tmp_path, ADAM, [9.0, 9.0, 9.0, 0.1], end=end)
    path = run.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    history = read_history(run)
    assert history is None or (history.state, history.epochs) == (State.UNFINISHED, lost - 1)
    assert progress_of(ADAM, run.folder).status is Status.WAITING
    with pytest.raises(ValueError, match="has not ended"):
        choose([run])


def test_a_run_that_broke_before_training_is_chosen_last(tmp_path: Path) -> None:
    broken = make_run(tmp_path, ADAM, [], end=None)
    broken.add({"kind": "end", "reason": "not finite", "epoch": 0, "step": 0})
    assert area(broken) == math.inf
    good = replace(ADAM, lr=1.0)
    assert choose([broken, make_run(tmp_path, good, [2, 1, 1, 1])]) == good


def test_the_smallest_mean_area_is_chosen(tmp_path: Path) -> None:
    lucky, steady = ADAM, replace(ADAM, lr=1e-2)
    runs = make_seeds(tmp_path, lucky, [[2, 0.1, 0.1, 0.1], [2, 2, 2, 2]])
    runs += make_seeds(tmp_path, steady, [[2, 1, 1, 0], [2, 1, 1, 0]])
    assert choose(runs) == steady
    assert choose(runs[:1] + runs[2:]) == lucky
    with pytest.raises(ValueError, match="no run"):
        choose([])


def test_settings_come_back_from_a_run(tmp_path: Path) -> None:
    fields, options = (("activation", "relu"), ("width", 0.5)), (("eps", 1e-6), ("every", 10))
    settings = replace(ADAM, subset=100, fields=fields, options=options, seed=3)
    assert settings_of(make_run(tmp_path, settings, [1.0]).config) == settings


def test_repeats_begin_with_the_seed_of_the_search() -> None:
    assert [one.seed for one in repeats(ADAM, 3)] == [0, 1, 2]
    assert repeats(ADAM, 1) == [ADAM]


def test_a_failed_run_is_not_chosen_from(tmp_path: Path) -> None:
    good, bad = ADAM, replace(ADAM, lr=1.0)
    make_run(tmp_path, good, [2, 1, 1, 1])
    asked: list[Sequence[Settings]] = []

    def run(settings: Sequence[Settings]) -> list[Progress]:
        asked.append(settings)
        return [
            Progress(one, folder_of(one, tmp_path), Status.FAILED if one == bad else Status.FINISHED)
            for one in settings
        ]

    found = sweep([bad, good], seeds=2, run=run)
    assert found.chosen == {"Adam": good}
    assert asked == [[bad, good], repeats(good, 2)]
    assert [progress.settings for progress in found.failed] == [bad]


def test_finished_runs_need_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, ADAM, [2, 1, 1, 1])
    monkeypatch.setitem(sys.modules, "ray", None)
    (found,) = run_all([ADAM], tmp_path)
    assert (found.status, found.epoch, found.valid_loss) == (Status.FINISHED, 3, 1)


def test_missing_ray_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(WorkersError, match=r"pip install 'hesscale\[lab\]'"):
        run_all([ADAM], tmp_path)


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None)  # other tests have started the real one
    monkeypatch.setattr(workers, "_ray", lambda: ray)
    with pytest.raises(WorkersError, match=r"cannot join a Ray cluster at 127.0.0.1:1: .*refused"):
        run_all([ADAM], tmp_path, address="127.0.0.1:1")


LRS = {"fine": 1e-1, "dies once": 1e-2, "raises": 1e-3, "breaks": 1e-4, "done before": 1e-5}
RUNS = {what: replace(ADAM, lr=lr) for what, lr in LRS.items()}


def made_up_training(calls: Path) -> Callable[..., None]:
    """Takes the place of training; what it does depends on the step size. Each call leaves a file."""
    lrs, make = LRS, make_run  # a worker gets this function by value and does not know this file

    def train(settings: Settings, folder: Path, *, data: Path | None) -> None:
        import torch

        before = len(list(calls.glob(f"{settings.lr}-*")))
        (calls / f"{settings.lr}-{before}").write_text(f"{torch.get_num_threads()} {data}")
        if settings.lr == lrs["raises"]:
            raise ArithmeticError("two\nlines")
        if settings.lr == lrs["dies once"] and not before:
            os._exit(1)
        broke = settings.lr == lrs["breaks"]
        make(
            folder,
            settings,
            [2, 1] if broke else [2, 1, 1, 1],
            end="not finite" if broke else "finished",
            folder=folder,
        )

    return train


def test_runs_survive_their_workers(two_workers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("calls").mkdir()
    root, boards = Path("runs"), []
    make_run(root, RUNS["done before"], [2, 1, 1, 1])
    train = made_up_training(tmp_path / "calls")
    found = run_all([*RUNS.values()], root, data=Path("data"), workers=2, watch=boards.append, train=train)
    statuses = dict(zip(RUNS, (progress.status for progress in found), strict=True))
    assert statuses == {
        "fine": Status.FINISHED,
        "dies once": Status.FINISHED,
        "raises": Status.FAILED,
        "breaks": Status.NOT_FINITE,
        "done before": Status.FINISHED,
    }
    calls = {path.name: path.read_text() for path in Path("calls").iterdir()}
    assert set(calls) == {"0.1-0", "0.01-0", "0.01-1", "0.001-0", "0.0001-0"}
    assert set(calls.values()) == {f"1 {tmp_path / 'data'}"}
    assert found[2].error == "ArithmeticError: two lines"
    assert found[2].folder == folder_of(RUNS["raises"], tmp_path / "runs")
    assert [progress.status for progress in boards[0]] == [Status.WAITING] * 4 + [Status.FINISHED]
    assert boards[-1] == found


def test_the_command_searches_with_other_fields(tmp_path: Path) -> None:
    relu = replace(ADAM, fields=(("activation", "relu"), ("width", 0.5)))
    make_seeds(tmp_path, relu, [[2, 1, 1, 1]])
    options = ["--optimizers", "Adam", "--lrs", "1e-3", "--beta1s", "0", "--beta2s", "0.999", "--epochs", "3"]
    fields = ["--field", "width=0.5", "--field", "activation=relu"]
    code, printed, _ = lab("sweep", "digits", *options, *fields, "--seeds", 1, "--out", tmp_path)
    assert code == 0 and "│ 5.000 │" in printed


def test_threads_take_as_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines with 7, 2 and 4 cores, of which the last is gone."""
    nodes = [{"Alive": place < 2, "Resources": {"CPU": cores}} for place, cores in enumerate((7.0, 2.0, 4.0))]
    ray = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes)
    monkeypatch.setattr(workers, "_ray", lambda: ray)
    for threads, room in ((1, 9), (2, 4), (3, 2), (7, 1)):
        with cluster(threads=threads) as found:
            assert found == room
        with cluster(threads=threads, workers=5) as found:
            assert found == 5
    with pytest.raises(WorkersError, match=r"no machine has 8 cores for Ray .at most 7.: ask for fewer --threads"):
        cluster(threads=8).__enter__()


def test_the_command_reads_what_is_finished_and_shows_the_choice(tmp_path: Path) -> None:
    for lr, last in ((1e-3, 1.0), (1e-2, 0.5)):
        make_seeds(tmp_path, replace(ADAM, lr=lr), [[2, 1, 1, last], [2, 1, 1, last]])
    options = ["--optimizers", "Adam", "--lrs", "1e-3,1e-2", "--beta1s", "0", "--beta2s", "0.999", "--epochs", "3"]
    code, printed, _ = lab("sweep", "digits", *options, "--seeds", 2, "--out", tmp_path)
    assert code == 0
    assert "│ 1e-2 │ 0, 0.999 │ 4.500 │ 0.5000 ± 0.0000 │ 95.00 ± 0.00 │" in printed
    (tmp_path / "two words").mkdir()
    (tmp_path / "digits").rename(tmp_path / "two words" / "digits")
    _, printed, _ = lab("sweep", "digits", *options, "--seeds", 2, "--out", tmp_path / "two words")
    assert f"`hesscale report '{tmp_path / 'two words' / 'digits'}'` draws" in printed
