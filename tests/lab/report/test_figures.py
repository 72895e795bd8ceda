"""Figures: no point is cut off, captions say what is shown, step sizes are written in one way."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hesscale_lab.report import learning_curves, sensitivity
from hesscale_lab.report.collect import Experiment, collect
from hesscale_lab.report.learning_curves import Against
from hesscale_lab.report.paper import paper_curves
from hesscale_lab.report.write import write
from hesscale_lab.studies import cost, quality_time

from ..made_up_runs import ADAM, make_run, make_seeds

RESULTS = Path(__file__).parents[3] / "results"
WHOLE_MARK = 2.0  # points between a mark's center and the edge of its panel


def experiment(root: Path) -> Experiment:
    (found,) = collect([root]).experiments
    return found


def assert_nothing_is_cut_off(figure: Figure) -> None:
    """Every finite point of every line lies within its panel, with room for its mark."""
    figure.draw_without_rendering()
    room = WHOLE_MARK * figure.dpi / 72
    panels = [axes for axes in figure.axes if axes.axison]
    assert panels
    for axes in panels:
        places = _places(axes)
        box = axes.get_window_extent()
        assert (places >= [box.x0 + room, box.y0 + room]).all(), axes.get_title()
        assert (places <= [box.x1 - room, box.y1 - room]).all(), axes.get_title()


def _places(axes: Axes) -> Any:
    """The points of all data lines in pixels."""
    marked = [line for line in axes.lines if line.get_transform() == axes.transData and len(line.get_xdata()) > 0]
    points = np.concatenate([line.get_xydata() for line in marked])
    return axes.transData.transform(points[np.isfinite(points).all(axis=1)])


@pytest.mark.parametrize("against", Against)
@pytest.mark.parametrize(
    "losses",
    [
        [[9, 5, 3, 1], [9, 5, 3, 2]],  # accuracies of 10 … 90 %: a linear scale, on which epoch 0 is far below
        [[9, 1, 0.5, 0.1], [9.9, 1, 0.4, 0.3]],  # 10 … 99 %: the scale of errors
        [[10, 0.1, 1e-9, 1e-9], [10, 1, 1e-9, 1e-9]],  # 0 … 100 %
        [[2], [2]],
    ],
)
def test_learning_curves_show_every_epoch(losses: list[list[float]], against: Against, tmp_path: Path) -> None:
    settings = replace(ADAM, epochs=len(losses[0]) - 1)
    make_seeds(tmp_path, settings, losses)
    make_run(tmp_path, replace(settings, optimizer="AdaHesScale"), losses[0])
    assert_nothing_is_cut_off(learning_curves.draw(experiment(tmp_path), {}, against=against))


def test_losses_that_are_not_above_0_have_a_linear_axis(tmp_path: Path) -> None:
    for lr, last in ((1e-3, -1.0), (1e-2, 0.5)):
        make_run(tmp_path, replace(ADAM, lr=lr), [2, 1, 0.5, last])
    found = experiment(tmp_path)
    for figure in (learning_curves.draw(found, {}), sensitivity.draw(found)):
        assert {axes.get_yscale() for axes in figure.axes if "loss" in axes.get_title() + axes.get_ylabel()} == {
            "linear"
        }


def test_the_papers_curves_are_not_cut_off_either(tmp_path: Path) -> None:
    make_run(tmp_path, replace(ADAM, task="mnist-mlp"), [2.3, 2.2, 2.1, 2.0])
    assert_nothing_is_cut_off(learning_curves.draw(experiment(tmp_path), paper_curves("mnist-mlp")))


def test_the_first_epochs_of_committed_results_are_shown() -> None:
    for found in collect([RESULTS / "train" / "cifar100-3c3d"]).experiments:
        assert_nothing_is_cut_off(learning_curves.draw(found, paper_curves(found.task)))


def test_step_sizes_are_written_as_in_tables(tmp_path: Path) -> None:
    for lr in (1e-3, 2e-3, 1e-2):
        make_run(tmp_path, replace(ADAM, lr=lr), [2, 1, 1, lr])
    figure = sensitivity.draw(experiment(tmp_path))
    assert_nothing_is_cut_off(figure)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "lr"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1e-3", "2e-3", "1e-2"]


def cost_records() -> list[dict[str, Any]]:
    """Batch 32 costs three times as much as batch 1, relative to Adam."""
    common = {"kind": "time", "panel": "layers", "exact": False, "seconds_without_forward": 1e-3}
    return [
        {**common, "batch": batch, "parameters": size, "optimizer": name, "ratio": ratio, "seconds": 1e-3 * ratio}
        for batch, factor in ((1, 1), (32, 3))
        for size in (1000, 100_000)
        for name, ratio in (("Adam", 1.0), ("AdaHesScale", 2.0 * factor), ("a new one", 1.5))
    ]


def test_cost_figures_show_every_cell_and_say_what_they_show() -> None:
    drawn = list(cost.figures({"threads": 1}, cost_records()))
    for one in drawn:
        assert_nothing_is_cut_off(one.figure)
    captions = {one.name: one.caption for one in drawn}
    assert captions["cost"].startswith("Milliseconds of a whole step")
    assert captions["cost-without-forward"].startswith("Milliseconds of backward and update alone")
    assert captions["cost-relative"].startswith("The time of a whole step divided by that of torch.optim.Adam")
    assert list(cost.figures({"threads": 1}, [])) == []


@pytest.mark.parametrize("name", ["quality/mnist-relu", "cost"])
def test_figures_of_committed_studies_show_everything(name: str) -> None:
    (study,) = collect([RESULTS / name]).studies
    for drawn in study.study.figures(study.config, study.records):
        assert_nothing_is_cut_off(drawn.figure)


def time_records(errors: dict[str, float]) -> list[dict[str, Any]]:
    common = {"kind": "time", "stage": "initial", "batch": 1, "samples": None}
    return [{**common, "method": name, "seconds": 1e-3, "error": error} for name, error in errors.items()]


def test_an_error_that_is_rounding_stands_at_the_foot_of_a_logarithmic_scale() -> None:
    records = time_records({"HesScale": 1.0, "HesScale rank=1": 0.3, "HesScale rank=full": 1e-16})
    (drawn,) = quality_time.figures({"title": "ReLU"}, records)
    assert_nothing_is_cut_off(drawn.figure)
    (axes,) = drawn.figure.axes
    assert axes.get_ylim()[0] > 0.1
    (mark,) = (line for line in axes.lines if line.get_fillstyle() == "none")
    assert 0 < float(mark.get_ydata()[0]) < 0.1  # of the panel's height


def test_an_odd_number_of_cells_is_drawn() -> None:
    lines = (RESULTS / "quality" / "cnn" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "time"]
    cells = list(dict.fromkeys((record["stage"], record["batch"]) for record in records))
    assert len(cells) == 4
    kept = [record for record in records if (record["stage"], record["batch"]) != cells[0]]
    (drawn,) = quality_time.figures({"title": "three"}, kept)
    assert sum(axes.axison for axes in drawn.figure.axes) == 3


def test_a_report_draws_studies_from_their_records(tmp_path: Path) -> None:
    """Some committed folders have no figure in them; none is needed."""
    source = RESULTS / "cost-now" / "headline"
    assert not list(source.glob("*.png"))
    collection = collect([source])
    assert write(collection, tmp_path).left_out == ()
    text = (tmp_path / "report.html").read_text()
    assert text.count("<img") == 3
    for words in ("Milliseconds of backward and update alone", "geometric means of 9 cells", "Made by", "1 run."):
        assert words in text
    assert "target" not in text


@pytest.mark.usefixtures("undrawn")
def test_figures_turn_dark_with_the_page(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", ADAM, [2, 1, 1, 1])
    write(collect([tmp_path / "runs"]), tmp_path / "report")
    text = (tmp_path / "report" / "report.html").read_text()
    assert "@media (prefers-color-scheme: dark) { .card { filter: invert(" in text
    assert text.count("<img") == text.count('<div class="card') == 2


@pytest.mark.usefixtures("undrawn")
def test_the_report_of_the_committed_runs_draws_every_figure_of_the_documents(
    tmp_path: Path,
) -> None:
    assert not write(collect([RESULTS]), tmp_path).left_out
    root = RESULTS.parent
    linked = {
        name
        for document in (root / "README.md", *(root / "docs").glob("*.md"))
        for name in re.findall(r"\((?:\.\./)?results/([^)]*\.(?:png|svg))\)", document.read_text())
    }
    assert linked and linked <= {f"report/{path.name}" for path in tmp_path.iterdir()}
