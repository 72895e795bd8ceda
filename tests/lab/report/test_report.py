"""Reports: numbers checked by hand, a page that is whole in itself, clear words about folders without runs."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hesscale_lab.figures import STYLES, styles
from hesscale_lab.optimizers import PAPERS
from hesscale_lab.report import learning_curves, sensitivity
from hesscale_lab.report.collect import Experiment, collect
from hesscale_lab.report.learning_curves import Against
from hesscale_lab.report.paper import paper_curves
from hesscale_lab.report.tables import final_table, settings_table
from hesscale_lab.wording import Estimate, counted, estimate, plain, power

from ..command import lab
from ..made_up_runs import ADAM, cut_off, make_run, make_seeds

MNIST = replace(ADAM, task="mnist-mlp")
RESULTS = Path(__file__).parents[3] / "results"
VOID = {"meta", "img", "source", "br", "link", "hr", "input"}


def only(root: Path) -> Experiment:
    (experiment,) = collect([root]).experiments
    return experiment


class Page(HTMLParser):
    """Checks that every element is closed in its turn, and gathers what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.mark.usefixtures("undrawn")
def test_an_optimizer_with_options_has_a_curve_of_its_own(tmp_path: Path) -> None:
    for options, loss in (((), 1.0), ((("every", 10),), 0.5), ((("every", 2),), 0.25)):
        make_seeds(tmp_path, replace(ADAM, optimizer="AdaHesScale", options=options), [[2, 1, 1, loss]] * 2)
    experiment = only(tmp_path)
    assert list(experiment.chosen) == ["AdaHesScale", "AdaHesScale every=2", "AdaHesScale every=10"]
    assert [s.values["test_loss"][-1].mean for s in experiment.chosen.values()] == [1, 0.25, 0.5]
    assert not experiment.is_search
    looks = styles(experiment.chosen)
    assert looks["AdaHesScale"] == STYLES["AdaHesScale"] and len(set(looks.values())) == 3
    assert lab("report", tmp_path, "--out", tmp_path / "out")[0] == 0
    assert "AdaHesScale every=10" in (tmp_path / "out" / "report.html").read_text()
    rows = list(csv.DictReader((tmp_path / "out" / "report.csv").read_text().splitlines()))
    assert {(row["optimizer"], row["options"]) for row in rows} == {
        ("AdaHesScale", words) for words in ("", "every=2", "every=10")
    }


def test_means_and_standard_errors_by_hand(tmp_path: Path) -> None:
    make_seeds(tmp_path, ADAM, [[2, 1, 1, 1], [2, 2, 1, 0.5], [2, 3, 1, 0]])
    series = only(tmp_path).chosen["Adam"]
    assert series.seeds == (0, 1, 2)
    assert series.values["test_loss"][1] == (2, pytest.approx(1 / math.sqrt(3)))
    assert series.values["test_loss"][3] == (0.5, pytest.approx(0.5 / math.sqrt(3)))
    assert series.values["valid_accuracy"][3].mean == pytest.approx(0.95)
    assert series.area == (5.5, pytest.approx(0.5 / math.sqrt(3)))  # 5, 5.5, 6
    assert series.best("test_loss") == (3, series.values["test_loss"][3])
    assert series.best("test_accuracy")[0] == 3
    assert series.seconds == (0, 2, 4, 6)
    assert series.seconds_per_epoch == 2


def test_one_seed_has_no_standard_error(tmp_path: Path) -> None:
    make_run(tmp_path, ADAM, [2, 1, 1, 0.5])
    experiment = only(tmp_path)
    value = experiment.chosen["Adam"].values["test_loss"][-1]
    assert value.mean == 0.5
    assert math.isnan(value.error)
    assert plain(value) == "0.5000"
    assert "±" not in " ".join(final_table(experiment, {}).rows[0])
    learning_curves.draw(experiment, {})


def test_runs_that_broke_count_with_their_first_values(tmp_path: Path) -> None:
    make_run(tmp_path, ADAM, [2, 1, 1, 0.5])
    make_run(tmp_path, replace(ADAM, seed=1), [2, 1], end="not finite")
    experiment = only(tmp_path)
    series = experiment.chosen["Adam"]
    assert series.not_finite == 1
    assert series.values["test_loss"][-1].mean == (0.5 + 2) / 2
    assert series.area.mean == (4.5 + 7) / 2
    assert series.seconds == (0, 2, 4, 6)  # of the run that came so far
    table = final_table(experiment, {})
    assert table.headings[-1] == "not finite"
    assert table.rows[0][-1] == "1"


def test_all_seeds_may_break(tmp_path: Path) -> None:
    make_run(tmp_path, ADAM, [2], end="not finite")
    make_run(tmp_path, replace(ADAM, lr=1.0), [2, math.nan], end=None)
    experiment = only(tmp_path)
    assert all(series.not_finite == 1 for series in experiment.series)
    assert final_table(experiment, {}).rows[0][9] == ""  # no epoch, no seconds per epoch
    for against in Against:
        learning_curves.draw(experiment, {}, against=against)
    sensitivity.draw(experiment)


def test_unfinished_runs_wait_for_their_end(tmp_path: Path) -> None:
    make_run(tmp_path, ADAM, [2, 1, 1, 1])
    cut_off(make_run(tmp_path, replace(ADAM, seed=1), [2, 1], end=None))
    series = only(tmp_path).chosen["Adam"]
    assert (series.seeds, series.unfinished, series.epochs) == ((0,), 1, 3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    collect([tmp_path])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_unfinished_runs_alone_are_shown_as_far_as_all_came(tmp_path: Path) -> None:
    for seed, losses in enumerate(([2, 1, 1], [2, 1])):
        make_run(tmp_path, replace(ADAM, seed=seed), losses, end=None)
    series = only(tmp_path).chosen["Adam"]
    assert (series.seeds, series.unfinished, series.epochs) == ((0, 1), 2, 1)


def test_runs_of_other_lengths_or_data_are_other_experiments(tmp_path: Path) -> None:
    for settings in (ADAM, replace(ADAM, epochs=2), replace(ADAM, subset=500), replace(ADAM, fields=(("width", 0.5),))):
        make_run(tmp_path, settings, [2, 1, 1])
    experiments = collect([tmp_path, tmp_path]).experiments  # a folder named twice counts once
    assert [e.title for e in experiments] == [
        "digits, 2 epochs",
        "digits, 3 epochs",
        "digits, 3 epochs, 500 training examples",
        "digits, 3 epochs, width 0.5",
    ]
    assert len({e.name for e in experiments}) == 4
    assert all(len(e.series[0].seeds) == 1 for e in experiments)


def test_most_seeds_are_chosen_then_the_smallest_area(tmp_path: Path) -> None:
    make_run(tmp_path, replace(ADAM, lr=1e-1), [2, 0, 0, 0])
    make_seeds(tmp_path, replace(ADAM, lr=1e-2), [[2, 1, 1, 1]] * 2)
    make_seeds(tmp_path, replace(ADAM, lr=1e-3), [[2, 1, 1, 0.5]] * 2)
    experiment = only(tmp_path)
    assert experiment.chosen["Adam"].lr == 1e-3
    assert experiment.is_search
    assert [row[1] for row in settings_table(experiment).rows] == ["1e-1", "1e-3", "1e-2"]


def test_a_setting_that_has_ended_goes_before_one_that_has_not(tmp_path: Path) -> None:
    for lr in (1e-3, 1e-4):
        make_seeds(tmp_path, replace(ADAM, lr=lr), [[2, 1, 1, lr]])
    for seed in (0, 1):
        make_run(tmp_path, replace(ADAM, lr=1e-1, seed=seed), [2, 0.5], end=None)  # more seeds, a smaller sum so far
    make_run(tmp_path, replace(ADAM, seed=1), [2, 1], end=None)
    experiment = only(tmp_path)
    assert experiment.chosen["Adam"].lr == 1e-4
    rows = [(row[1], row[3]) for row in settings_table(experiment).rows]
    assert rows == [("1e-4", "1"), ("1e-3", "1"), ("1e-1", "2 (at epoch 1)")]
    assert final_table(experiment, {}).rows[0][3] == "1"
    (axes,) = sensitivity.draw(experiment).axes
    assert [*axes.lines[0].get_xdata()] == [1e-4, 1e-3]  # type: ignore[misc]


@pytest.mark.usefixtures("undrawn")
def test_areas_of_unfinished_settings_are_compared_over_the_same_epochs(tmp_path: Path) -> None:
    make_run(tmp_path, replace(ADAM, lr=1e-1), [2, 1.5], end=None)
    make_run(tmp_path, replace(ADAM, lr=1e-2), [2, 1, 1], end=None)
    assert only(tmp_path).chosen["Adam"].lr == 1e-2
    assert lab("report", tmp_path, "--out", tmp_path / "out")[0] == 0
    assert not list((tmp_path / "out").glob("*-sensitivity.png"))  # there is no final loss yet


def test_estimates() -> None:
    assert plain(Estimate(1.5e30, 0.25)) == "1.50e+30 ± 0.2500"
    assert estimate([1.0, 3.0]) == Estimate(2.0, 1.0)
    assert [power(value) for value in (1e-4, 0.1, 1.0, 10.0, 3e-4, 0.0)] == ["1e-4", "1e-1", "1", "1e1", "3e-4", "0"]


def test_optimizers_keep_their_colors() -> None:
    assert len({color for color, _ in STYLES.values()}) == len(STYLES)
    found = styles(["New", "SGD", "AdaHesScale"])
    assert list(found) == ["AdaHesScale", "SGD", "New"]
    assert found["SGD"] == STYLES["SGD"]


def test_the_papers_curves() -> None:
    mnist = paper_curves("mnist-mlp")
    assert set(mnist) == set(PAPERS)
    ours = mnist["AdaHesScale"]
    assert (ours.lr, ours.beta1, ours.beta2, ours.seeds, ours.epochs) == (1e-4, 0.0, 0.9999, 30, 100)
    assert ours.values["test_accuracy"][100].mean == pytest.approx(0.9818, abs=5e-5)
    assert ours.values["test_accuracy"][100].error == pytest.approx(1e-4, rel=0.5)
    area = sum(value.mean for value in ours.values["valid_loss"])
    assert area == pytest.approx(10.989, abs=2e-3)
    lengths = {
        task: paper_curves(task)["Adam"].epochs for task in ("cifar10-3c3d", "cifar100-3c3d", "cifar100-allcnnc")
    }
    assert lengths == {"cifar10-3c3d": 100, "cifar100-3c3d": 200, "cifar100-allcnnc": 350}
    assert "AdaBL89" not in paper_curves("cifar100-3c3d")
    assert paper_curves("digits") == {}


def test_the_paper_stands_beside_ours_at_the_same_epoch(tmp_path: Path) -> None:
    make_run(tmp_path, MNIST, [2, 1, 1, 0.5])
    row = final_table(only(tmp_path), paper_curves("mnist-mlp")).rows[0]
    assert row[-2].startswith(f"{100 * paper_curves('mnist-mlp')['Adam'].values['test_accuracy'][3].mean:.2f} ± ")


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for lr in (1e-3, 1e-2):
        make_seeds(runs, replace(MNIST, lr=lr), [[2, 1, 1, lr], [2, 1.1, 1, 0.5]])
    make_run(runs, replace(MNIST, optimizer="SGD", beta2=0.0), [2, 1], end="not finite")
    study = runs / "quality"
    shutil.copytree(RESULTS / "quality" / "paper", study)
    config = json.loads((study / "config.json").read_text())
    (study / "config.json").write_text(json.dumps({**config, "title": "a <b> & c"}))
    (runs / "broken").mkdir()
    (runs / "broken" / "config.json").write_text("{")
    out = tmp_path / "new" / "report"
    code, _, complaint = lab("report", runs, "--out", out)
    assert code == 0
    assert complaint.startswith(f"hesscale: left out {runs / 'broken'}: config.json is not readable (")
    assert complaint.count("\n") == 1
    names = [f"mnist-mlp-e3-{name}" for name in ("epochs", "seconds", "sensitivity")]
    assert {path.name for path in out.iterdir()} == {
        "report.html",
        "report.csv",
        "seconds.csv",
        "quality.csv",
        "quality-quality.png",
        "quality-time.png",
        *(f"{name}.{kind}" for name in names for kind in ("png", "svg")),
    }
    text = (out / "report.html").read_text()
    page = Page(text)
    images = page.named("img")
    assert len(images) == 5
    assert all((image["src"] or "").startswith("data:image/png;base64,iVBOR") and image["alt"] for image in images)
    assert all((source["srcset"] or "").startswith("data:image/png;base64,") for source in page.named("source"))
    assert "http:" not in text
    assert "https:" not in text
    assert not page.named("script")
    assert not page.named("link")
    anchors = {attributes["id"] for attributes in page.named("section")}
    assert {f"#{anchor}" for anchor in anchors} == {link["href"] for link in page.named("a")}
    assert "a &lt;b&gt; &amp; c" in text
    assert "hesscale train mnist-mlp --optimizer Adam" in text
    assert "torch 2" in text
    assert "prefers-color-scheme: dark" in text


def test_folders_without_runs_are_one_sentence(tmp_path: Path) -> None:
    code, _, complaint = lab("report", tmp_path, "--out", tmp_path / "report")
    assert code == 1
    assert (
        complaint == f"hesscale: no run to report on in {tmp_path}: `hesscale train` and `hesscale sweep` make them\n"
    )
    code, _, complaint = lab("report", tmp_path / "nowhere", "--out", tmp_path / "report")
    assert code == 2
    assert complaint == f"hesscale: {tmp_path / 'nowhere'} is not a folder\n"
    assert not (tmp_path / "report").exists()


def test_one_is_singular(tmp_path: Path) -> None:
    make_run(tmp_path, replace(ADAM, epochs=1, subset=1), [2, 1])
    assert only(tmp_path).title == "digits, 1 epoch, 1 training example"
    assert counted(1200, "seed") == "1,200 seeds"


@pytest.mark.usefixtures("undrawn")
def test_the_numbers_stand_beside_the_report(tmp_path: Path) -> None:
    make_seeds(tmp_path / "runs", ADAM, [[2, 1, 1, 1], [2, 2, 1, 0.5]])
    make_run(tmp_path / "runs", replace(ADAM, lr=0.1), [2, 1], end="not finite")
    assert lab("report", tmp_path / "runs", "--out", tmp_path / "report")[::2] == (0, "")
    with (tmp_path / "report" / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4
    row = next(row for row in rows if row["lr"] == "0.001" and row["epoch"] == "3")
    assert (row["task"], row["optimizer"], row["seeds"], row["chosen"], row["seconds"]) == (
        "digits",
        "Adam",
        "2",
        "1",
        "6.0",
    )
    assert (float(row["test_loss"]), float(row["test_loss_se"])) == (0.75, 0.25)
    broken = [row for row in rows if row["lr"] == "0.1"]
    assert [row["seconds"] for row in broken] == ["0.0", "2.0", "", ""]
    assert {(row["not_finite"], row["chosen"], row["test_loss_se"]) for row in broken} == {("1", "0", "")}
    assert not (tmp_path / "report" / "cost.csv").exists()
