"""The cost study: what it prints and writes, that disturbed rounds are repeated, how growth and memory are found."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from hesscale_lab.cli import study
from hesscale_lab.studies import cost, cost_steps, cost_timing
from hesscale_lab.studies.cost_timing import Clocks, DisturbanceMeter, interleaved
from hesscale_lab.tasks import cost_networks
from hesscale_lab.tasks.cost_networks import Problem, Workload

from ..command import lab


def cell(panel: str, layers: int, batch: int = 1, **more: bool) -> Workload:
    make = functools.partial(cost_networks.mlp, 3, *[4] * layers, 2, activation=torch.nn.Tanh)
    return Workload(panel, f"{layers} {panel}", batch, make, lambda count: torch.randn(count, 3), 2, quick=True, **more)


TINY = (cell("layers", 2), cell("layers", 1, headline=True), cell("outputs", 1), cell("networks", 1))
SMALL = ("--quick", "--rounds", 2)
AOT_EAGER = {"backend": "aot_eager"}  # compiles nothing


def records_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_networks, "CELLS", TINY)
    monkeypatch.setattr(cost_networks, "WEIGHED", (cell("memory", 1),))
    monkeypatch.setattr(cost_timing, "_PIECE", 1e-9)
    chosen = ("Adam", "Adam fused", "AdaHesScale", "AdaHessian", "exact GGN")
    methods = tuple(method for method in cost_steps.METHODS if method.name in chosen)
    monkeypatch.setattr(cost_steps, "METHODS", methods)


@pytest.mark.usefixtures("tiny")
def test_it_prints_tables_and_writes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views = {name: cost._VIEWS[name] for name in ("cost", "cost-relative")}  # drawing takes seconds
    monkeypatch.setattr(cost, "_VIEWS", views)
    code, printed, _ = lab("cost", *SMALL, "--out", tmp_path)
    assert code == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["command"] == "hesscale cost --rounds 2 --threads 1 --quick"
    records = records_in(tmp_path)
    assert {record["optimizer"] for record in records} == {method.name for method in cost_steps.METHODS}
    assert records[0]["cell"] == "1 layers, batch 1"  # those of the headline come first
    units = [record for record in records if record["optimizer"] == "Adam"]
    assert len(units) == len(TINY) + 1
    assert all(record["ratio"] == 1 for record in units)
    for title in ("geometric means of 1 cell ", "Growth", "Peak of memory", "rounds;"):
        assert title in " ".join(printed.split())
    assert "target" not in printed
    for name in views:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()[:1000]


@pytest.mark.usefixtures("tiny")
def test_parts_and_interrupts_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "draw", lambda run, row, records: None)
    measure, asked = cost.measure_time, []

    def interrupted(cell: Workload, *more: object, **options: object) -> object:
        asked.append(cell.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return measure(cell, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cost, "measure_time", interrupted)
    assert lab("cost", *SMALL, "--only", "headline", "--out", tmp_path)[0] == 0
    assert asked == ["1 layers, batch 1"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["asked"] == ["headline"] and config["command"].endswith(" --quick --only headline")
    code, _, complaint = lab("cost", *SMALL, "--out", tmp_path)
    assert code == 130
    assert "the same command goes on" in complaint
    first = (tmp_path / "metrics.jsonl").read_text()
    assert lab("cost", *SMALL, "--out", tmp_path)[0] == 0
    assert asked[2:] == ["1 outputs, batch 1", "1 outputs, batch 1", "1 networks, batch 1"]
    finished = (tmp_path / "metrics.jsonl").read_text()
    assert finished.startswith(first)
    assert lab("cost", *SMALL, "--out", tmp_path)[0] == 0
    assert (tmp_path / "metrics.jsonl").read_text() == finished
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["asked"] == ["headline", "all"] and config["command"].endswith(" --quick")
    code, _, complaint = lab("cost", "--quick", "--rounds", 3, "--out", tmp_path)
    assert code == 2
    assert "holds a run with other rounds" in complaint


@pytest.mark.usefixtures("tiny")
def test_peers_that_are_not_installed_are_left_out_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "draw", lambda run, row, records: None)
    peer = cost_steps.Method("theirs", lambda problem: pytest.fail("used"), package=("not_there", "not-there"))
    monkeypatch.setattr(cost_steps, "METHODS", (*cost_steps.METHODS, peer))
    code, _, complaint = lab("cost", *SMALL, "--only", "memory", "--out", tmp_path)
    assert code == 0
    assert complaint.strip() == "hesscale: left out “theirs”: pip install --no-deps not-there"
    assert "theirs" not in json.loads((tmp_path / "config.json").read_text())["optimizers"]


@pytest.mark.usefixtures("tiny")
def test_one_optimizer_is_measured_beside_the_two_it_is_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "draw", lambda run, row, records: None)
    options = ("--only", "headline", "--optimizer", "AdaHesScale", "--out", tmp_path)
    assert lab("cost", *SMALL, *options)[0] == 0
    measured = {record["optimizer"] for record in records_in(tmp_path)}
    assert measured == {cost_steps.UNIT, cost_steps.HARDEST, "AdaHesScale"}
    code, _, complaint = lab("cost", *SMALL, "--only", "headline", "--out", tmp_path)
    assert code != 0  # a folder of some optimizers does not become one of all
    assert "optimizers" in complaint


class Machine:
    """Clocks that stand still unless time is spent; the fixed work takes a millisecond on a calm machine."""

    def __init__(self) -> None:
        self.wall = self.busy = 0.0
        self.slowdown, self.slowed = 1.0, False

    def spend(self, seconds: float, *, waiting: float = 0.0) -> None:
        self.wall += seconds + waiting
        self.busy += seconds

    def meter(self) -> DisturbanceMeter:
        return DisturbanceMeter(Clocks(lambda: self.wall, lambda: self.busy, lambda: self.spend(1e-3 * self.slowdown)))


def _waiting(machine: Machine) -> Iterator[float]:
    """Another process takes the processor in the second and third round."""
    for disturbed in (False, True, True, False, False):
        machine.spend(1.0, waiting=0.2 if disturbed else 0.0)
        yield 5.0 if disturbed else 1.0


def _slowing(machine: Machine) -> Iterator[float]:
    """A neighbor slows everything down from the second round on until the third has begun."""
    for disturbed in (False, True, True, False, False):
        machine.slowdown = 1.0
        machine.spend(1.0)
        if disturbed and not machine.slowed:
            machine.slowdown, machine.slowed = 1.3, True
        yield 5.0 if disturbed else 1.0


@pytest.mark.parametrize("history", [_waiting, _slowing])
def test_disturbed_rounds_are_repeated(history: Callable[[Machine], Iterator[float]]) -> None:
    machine = Machine()
    seconds = history(machine)
    found = interleaved({"piece": lambda: (next(seconds),)}, rounds=3, meter=machine.meter())
    assert found.times == ({"piece": (1.0,)},) * 3
    assert (found.repeated, found.disturbed) == (2, 0)


def test_where_no_round_is_calm_the_least_disturbed_are_kept() -> None:
    machine = Machine()
    waits = iter([0.5, 0.1, 0.4, 0.2])

    def piece() -> tuple[float]:
        wait = next(waits)
        machine.spend(1.0, waiting=wait)
        return (wait,)

    found = interleaved({"piece": piece}, rounds=2, meter=machine.meter())
    assert [times["piece"] for times in found.times] == [(0.1,), (0.2,)]
    assert (found.repeated, found.disturbed) == (2, 2)


def test_rounds_run_every_piece_and_begin_with_another_each_time() -> None:
    machine, order = Machine(), []

    def piece(name: str) -> tuple[float]:
        order.append(name)
        machine.spend(1.0)
        return (1.0,)

    interleaved({name: functools.partial(piece, name) for name in "abc"}, rounds=3, meter=machine.meter())
    assert "".join(order) == "abcbcacab"


def line(optimizer: str, seconds: Callable[[int], float], sizes: tuple[int, ...]) -> list[dict[str, object]]:
    common = {"kind": "time", "panel": "layers", "batch": 1, "exact": False, "optimizer": optimizer}
    return [{**common, "parameters": size, "seconds": seconds(size)} for size in sizes]


def test_the_growth_exponent_is_that_of_the_data() -> None:
    sizes = tuple(10**power for power in range(3, 9))
    records = [
        *line("linear", lambda n: 3e-9 * n, sizes),
        *line("square root", lambda n: n**0.5, sizes),
        *line("overhead", lambda n: 1e-3 + 1e-8 * n, sizes),
        *line("few", lambda n: 2.0 * n, sizes[:3]),
    ]
    found = {name: exponents for (name, _), exponents in cost.growth(records).items()}
    assert found["linear"][0] == pytest.approx(1)
    assert found["square root"] == (pytest.approx(0.5), pytest.approx(0.5))
    assert found["overhead"][0] < 0.8 < 0.9 < (found["overhead"][1] or 0) < 1
    assert found["few"][1] is None


def test_the_headline_is_a_geometric_mean() -> None:
    common = {"kind": "time", "panel": "", "headline": True, "exact": False, "optimizer": "AdaHesScale every=10"}
    records = [
        {**common, "ratio": ratio, "ratio_without_forward": 2.0, "ratio_to_fused": 3.0} for ratio in (0.5, 2.0, 1.0)
    ]
    (table, *_) = cost.tables({}, records)
    assert table.title.endswith("geometric means of 3 cells")
    assert table.rows == (("AdaHesScale every=10", "1.00", "2.00", "3.00"),)


def test_the_papers_ratios_are_those_it_published() -> None:
    found = {name: cost.papers_ratio("layers", name) for name in ("AdaHesScale", "AdaHesScaleGN", "AdaHessian")}
    assert found == {
        "AdaHesScale": pytest.approx(2.218, abs=1e-3),
        "AdaHesScaleGN": pytest.approx(1.313, abs=1e-3),
        "AdaHessian": pytest.approx(3.395, abs=1e-3),
    }
    assert cost.papers_ratio("outputs", "Adam fused") is None


def test_the_peak_of_memory_is_counted_in_bytes() -> None:
    def work() -> None:
        kept = torch.empty(1000)  # before the step, and freed within it
        with record_function("last step"):
            for size in (200, 500):
                torch.empty(size)
            del kept
            torch.empty(300)

    assert cost_timing.peak_bytes(work) == (4 * 1500, 4 * 1000)


# what torch.compile makes is tested with the optimizers, and takes its time
UNCOMPILED = [m for m in cost_steps.METHODS if "fused" not in m.name or m.name == cost_steps.HARDEST]


@pytest.mark.parametrize("method", UNCOMPILED, ids=lambda method: method.name)
def test_every_optimizer_makes_steps_that_leave_no_gradient(method: cost_steps.Method) -> None:
    if not method.installed:
        pytest.skip(f"needs {method.package}")
    problem: Problem = TINY[0].problem()
    params = list(problem.network.parameters())
    assert method.fits(problem)
    with cost_steps.known_warnings():
        step = method.step(problem)
        for _ in range(2):
            step.backward(step.forward())
            assert all(p.grad is not None for p in params)
            step.update()
            step.clear()
            assert all(p.grad is None for p in params)
    assert all(torch.isfinite(p).all() for p in params)


def test_a_compiled_step_leaves_no_gradient_either() -> None:
    problem: Problem = TINY[0].problem()
    step = cost_steps._compiled_second_order(problem, pieces="eager")
    params = list(problem.network.parameters())
    for _ in range(2):
        step.backward(step.forward())
        assert all(p.grad is not None and p.curvature is not None for p in params)  # type: ignore[attr-defined]
        step.update()
        step.clear()
        assert all(p.grad is None for p in params)


def test_compiled_passes_are_measured_beside_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_eager = {
        "AdaHesScale compiled": functools.partial(cost_steps._compiled_second_order, pieces="eager"),
        "plain pass of a region": functools.partial(cost_steps._pass, backend="hesscale", pieces="eager"),
        "curvature pass compiled": functools.partial(cost_steps._curvature_pass, backend="hesscale", pieces="eager"),
    }
    methods = [
        replace(method, step=by_eager.get(method.name, method.step))
        for method in cost_steps.COMPILED
        if method.name not in ("Adam compiled", "plain pass compiled")
    ]
    monkeypatch.setattr(cost_steps, "COMPILED", methods)
    monkeypatch.setattr(cost_networks, "COMPILED", (TINY[3],))
    monkeypatch.setattr(cost_timing, "_PIECE", 1e-9)
    monkeypatch.setattr(study, "draw", lambda run, row, records: None)
    code, printed, _ = lab("cost", *SMALL, "--compiled", "--out", tmp_path)
    assert code == 0
    assert {record["optimizer"] for record in records_in(tmp_path)} == {method.name for method in methods}
    assert json.loads((tmp_path / "config.json").read_text())["command"].endswith("--quick --compiled")
    assert "AdaHesScale compiled" in printed


def test_peers_are_found_by_their_module() -> None:
    for method in cost_steps.METHODS:
        if method.package is not None:
            assert method.installed == (importlib.util.find_spec(method.package[0]) is not None)


def test_backpack_is_offered_without_the_torch_that_it_would_bring() -> None:
    absent = [method for method in cost_steps.METHODS if method.package is not None]
    hint = cost_steps.left_out([replace(method, package=("not_there", method.package[1])) for method in absent])
    assert hint is not None
    assert hint.endswith("pip install --no-deps backpack-for-pytorch einops unfoldNd pytorch_optimizer")
