"""``hesscale inspect``: the table, the page, and what it says when something is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hesscale
from hesscale_lab.report.inspection import counts, figures

from ..command import lab

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
{imports}

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 10))
    batches = [(torch.randn(8, 6), torch.randint(10, (8,))) for _ in range(3)]
    {change}
    return model, F.cross_entropy, batches

nothing = 3
"""


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a script leaves in the interpreter goes."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("network", "neighbor"):
        sys.modules.pop(name, None)


def script(folder: Path, change: str = "", imports: str = "") -> Path:
    path = folder / "network.py"
    path.write_text(SCRIPT.format(change=change, imports=imports))
    return path


def test_it_prints_a_table_and_writes_a_page(tmp_path: Path) -> None:
    (tmp_path / "neighbor.py").write_text("there = True")
    path = script(tmp_path, imports="import neighbor")
    code, printed, complaint = lab("inspect", f"{path}:make", "--rank", 1, "--out", tmp_path / "page.html")
    assert (code, complaint) == (0, "")
    content = (tmp_path / "page.html").read_text()
    model, loss_fn, batches = sys.modules["network"].make()
    found = hesscale.applications.inspect(model, loss_fn, batches, rank=1)
    for row in found.rows[1:]:
        assert all(cell in printed for cell in row)
        assert f'<th scope="row">{row[0]}</th>' in content
        assert all(f"<td>{cell}</td>" in content for cell in row[1:])
    assert content.count("data:image/png;base64,") == 2
    assert "http" not in content and "<script" not in content


@pytest.mark.parametrize("columns", [80, 20])
def test_numbers_are_whole_in_little_room(columns: int, tmp_path: Path) -> None:
    code, printed, _ = lab("inspect", f"{script(tmp_path)}:make", "--out", tmp_path / "page.html", columns=columns)
    assert code == 0
    found = hesscale.applications.inspect(*sys.modules["network"].make())
    lines = [line.strip("│").split("│") for line in printed.splitlines() if line.startswith("│")]
    assert [tuple(cell.strip() for cell in line) for line in lines] == [*found.rows[1:]]


def test_some_batches_are_enough(tmp_path: Path) -> None:
    path, out = script(tmp_path), tmp_path / "page.html"
    assert lab("inspect", f"{path}:make", "--batches", 1, "--method", "ggn_mc", "--out", out)[0] == 0
    first = out.read_bytes()
    assert lab("inspect", f"{path}:make", "--batches", 1, "--method", "ggn_mc", "--out", out)[0] == 0
    assert out.read_bytes() == first
    assert lab("inspect", f"{path}:make", "--batches", 1, "--method", "ggn_mc", "--seed", 1, "--out", out)[0] == 0
    assert out.read_bytes() != first


@pytest.mark.parametrize(
    ("what", "change", "options", "sentence"),
    [
        ("network.py", "", (), "is given as FILE.py:FUNCTION"),
        ("nowhere.py:make", "", (), "there is no file"),
        ("network.py:other", "", (), "has no function other"),
        ("network.py:nothing", "", (), "has no function nothing"),
        ("network.py:make", "return model", (), "must return model, loss_fn, batches, not a Sequential"),
        ("network.py:make", "return batches, model, 3", (), "not list, Sequential, int"),
        ("network.py:make", "batches = []", (), "gave no examples"),
        ("network.py:make", "batches[0][0][0] = torch.nan", (), "look for inf or nan"),
        ("network.py:make", "model.requires_grad_(False)", (), "no parameter of the model requires grad"),
        ("network.py:make", "", ("--method", "guess"), "unknown method 'guess'"),
        ("network.py:make", "", ("--rank", "-1"), "--rank must be a number from 0, or full"),
        ("network.py:make", "", ("--method", "ggn", "--rank", "1"), "rank= goes with"),
        ("network.py:make", "", ("--batches", "0"), "--batches must be at least 1"),
        ("no.such.module:make", "", (), "there is no module no.such.module"),
    ],
)
def test_what_is_wrong_is_one_line(
    what: str, change: str, options: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, change)
    monkeypatch.chdir(tmp_path)
    code, printed, complaint = lab("inspect", what, *options)
    assert code in (1, 2)
    assert printed == ""
    assert complaint.startswith("hesscale: ") and complaint.count("\n") == 1
    assert sentence in complaint
    assert not (tmp_path / "inspection.html").exists()


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    code, _, complaint = lab("inspect", f"{script(tmp_path)}:make", "--out", tmp_path / "none" / "page.html")
    assert code == 1
    assert complaint.count("\n") == 1


def test_every_entry_is_counted_once_or_left_out() -> None:
    h = torch.tensor([1.0, -0.5, 1e-3, 0.0, 1e-30, 1e-10])
    edges = torch.linspace(-10, 0, 49, dtype=torch.float64)
    assert float(counts(h.double(), edges).sum()) == 4
    first, second = figures({"a": h, "b": torch.ones(2)})
    assert (first.name, second.name) == ("histogram", "heatmap")
    assert "25.0%" in first.caption
    assert [*figures({"a": torch.zeros(3)})] == []


def test_a_loss_function_of_torch_will_do(tmp_path: Path) -> None:
    path = script(tmp_path, "return model, nn.CrossEntropyLoss(), iter(batches)")
    assert lab("inspect", f"{path}:make", "--out", tmp_path / "page.html")[0] == 0
