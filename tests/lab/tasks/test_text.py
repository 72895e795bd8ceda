"""The language model: what it predicts from what, the windows of a text, texts that cannot be read."""

from __future__ import annotations

import gzip
import math
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import hesscale
from hesscale_lab.batches import generator_for, load
from hesscale_lab.cli.train import train
from hesscale_lab.optimizers import OPTIMIZERS
from hesscale_lab.runs import Run
from hesscale_lab.tasks.table import TASKS
from hesscale_lab.tasks.text import BUNDLED, read_text
from hesscale_lab.workers import progress_of, run_all, settings_of

TASK = TASKS["text-gpt"]
SMALL = TASK.with_fields([("context", 8), ("width", 16), ("layers", 2), ("heads", 2), ("batch", 4)])


def test_it_has_about_a_million_parameters_and_starts_from_chance() -> None:
    model = TASK.make(generator_for(0, "weights"))
    assert sum(p.numel() for p in model.parameters()) == 1_065_600
    data = load(TASK, seed=0)
    x, y = next(data.epoch(1))
    assert x.shape == y.shape == (32, 64)
    assert float(TASK.loss(model(x), y).detach()) == pytest.approx(math.log(256), abs=0.1)


def test_nothing_is_known_of_what_comes_later() -> None:
    model = SMALL.make(generator_for(0, "weights"))
    x = torch.randint(256, (3, 8), generator=generator_for(0, "x"))
    other = x.clone()
    other[:, 5:] = 7
    before, after = (model(tokens).view(3, 8, 256) for tokens in (x, other))
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_labels_are_the_next_characters_and_no_window_is_in_two_sets(tmp_path: Path) -> None:
    content = bytes(index % 251 for index in range(1000))
    (tmp_path / "text.txt").write_bytes(content)
    task = SMALL.with_fields([("text", "text.txt")])
    (examples, labels), (test, _) = task.load(tmp_path)
    assert bytes(examples.flatten().tolist()) == content[: 112 * 8]  # of 900 bytes
    assert bytes(labels.flatten().tolist()) == content[1 : 112 * 8 + 1]
    assert bytes(test.flatten().tolist()) == content[900 : 900 + 12 * 8]
    data = load(task, seed=0, folder=tmp_path)
    assert len(data.valid) == 11 and sorted([*data.valid.tolist(), *data.train.tolist()]) == list(range(112))


def test_the_loss_is_per_character_by_hand() -> None:
    outputs = torch.randn(6, 256, generator=generator_for(0, "logits"))
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    by_hand = [-float(row.log_softmax(0)[label]) for row, label in zip(outputs, labels.flatten(), strict=True)]
    assert float(TASK.loss(outputs, labels)) == pytest.approx(sum(by_hand) / 6)
    assert float(TASK.loss(outputs, labels, reduction="sum")) == pytest.approx(sum(by_hand))
    outputs[2, 3] = 99
    pairs = zip(outputs.argmax(1).tolist(), labels.flatten().tolist(), strict=True)
    assert TASK.right(outputs, labels) == sum(found == label for found, label in pairs) >= 1


def test_curvature_passes_through_it_and_is_exact_in_the_last_layer() -> None:
    model = SMALL.make(generator_for(0, "weights")).double()
    x, y = (torch.randint(256, (2, 8), generator=generator_for(0, name)) for name in "xy")
    hesscale.backward(SMALL.loss(model(x), y))
    assert all(bool(p.curvature.isfinite().all()) for p in model.parameters())
    with torch.no_grad():  # of a softmax layer: mean over characters of (q − q²) a²
        hidden = model.last(model.blocks(model.symbols(x) + model.places.weight)).flatten(0, 1)
        q = model(x).softmax(1)
        torch.testing.assert_close(model.logits.weight.curvature, (q - q**2).T @ hidden**2 / 16, rtol=0, atol=1e-12)


def test_a_text_comes_from_a_folder_a_path_an_archive_or_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_text(BUNDLED).startswith(b"CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    (tmp_path / "a.txt").write_text("häuser")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"packed"))
    assert read_text("a.txt", tmp_path) == "häuser".encode() == read_text(str(tmp_path / "a.txt"))
    assert read_text("a.gz", tmp_path) == b"packed"
    monkeypatch.chdir(tmp_path)
    assert read_text("a.gz") == b"packed"


app = typer.Typer()
app.command()(train)
SIZES = [word for size in ("context=8", "width=8", "layers=1", "heads=2", "batch=8") for word in ("--field", size)]


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["text-gpt", "--lr", "1e-3", "--epochs", "1", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_it(name: str, tmp_path: Path) -> None:
    """Also AdaHessian, which differentiates twice: fused attention cannot."""
    options = ("--optimizer", name, "--lr", 1e-6, "--subset", 64, "--out", tmp_path)
    assert command(*SIZES, *options)[0] == 0
    (path,) = tmp_path.rglob("config.json")
    assert Run(path.parent).records[-1]["reason"] == "finished"


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("missing.txt", "cannot read the text missing.txt: No such file or directory"),
        ("nowhere_at_all:a.txt", "there is no package nowhere_at_all to read nowhere_at_all:a.txt from"),
        ("hesscale_lab:data/none.txt", "cannot read the text hesscale_lab:data/none.txt: No such file"),
        ("bad.gz", "bad.gz is damaged ("),
        ("short.txt", "short.txt is too short for windows of 8 characters"),
        ("few.txt", "2 examples are less than one batch of 8"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_sentence(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gz").write_bytes(b"no archive")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "few.txt").write_text("few words " * 20)
    _, said = command(*SIZES, "--field", f"text={text}", "--data", tmp_path, "--out", tmp_path / "runs")
    assert said.startswith(f"hesscale: {complaint}") and said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_heads_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    assert command("--field", "heads=3", "--out", tmp_path) == (
        2,
        "hesscale: 3 heads cannot share a width of 128 equally\n",
    )


@pytest.mark.usefixtures("two_workers")
def test_another_text_of_the_same_name_is_another_run(tmp_path: Path) -> None:
    text = tmp_path / "my own.txt"
    arguments = (*SIZES, "--field", "text=my own.txt", "--data", tmp_path, "--out", tmp_path / "runs")
    text.write_text("the same words again and again, " * 100)
    assert command(*arguments)[0] == 0
    (path,) = (tmp_path / "runs").rglob("config.json")
    config = Run(path.parent).config
    assert config["text"] == sha256(text.read_bytes()).hexdigest()[:16]
    settings = settings_of(config)
    assert command(*arguments) == (0, "")  # finished
    text.unlink()
    assert command(*arguments) == (0, "")  # nothing needs to be read
    text.write_text("other words again and again, " * 100)
    assert command(*arguments) == (
        2,
        f"hesscale: {path.parent} holds a run with other text: choose another --out\n",
    )
    (there,) = run_all([settings], tmp_path / "again", data=tmp_path, workers=1)
    assert there.error is not None and there.error.startswith("the text here (digest ")
    assert progress_of(settings, path.parent).has_ended


@pytest.mark.usefixtures("two_workers")
def test_it_trains_on_a_file_here_and_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "own.txt").write_text("the same words again and again, " * 100)
    code, said = command(*SIZES, "--every", 5, "--field", "text=books/own.txt", "--out", tmp_path / "runs")
    assert code == 0, said
    (path,) = (tmp_path / "runs").rglob("config.json")
    assert path.parent.parent.name == (
        "lr1e-03-b0.9-b0.999-e1-every=5-batch=8-context=8-heads=2-layers=1-text=books_own.txt-width=8"
    )
    run = Run(path.parent)
    losses = [record["valid_loss"] for record in run.records[:-1]]
    assert losses[1] < losses[0] < math.log(256) + 0.1
    (again,) = run_all([settings_of(run.config)], tmp_path / "again", data=tmp_path, workers=1)
    assert again.has_ended, again.error
    assert [r.get("valid_loss") for r in Run(again.folder).records] == [*losses, None]
