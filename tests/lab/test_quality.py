"""The demo's study and its command, at a size that takes seconds."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from hesscale.testing import exact_diagonal
from hesscale_lab.cli import app
from hesscale_lab.studies.approximation_quality import (
    REFERENCE,
    ZERO,
    exact_diagonals,
    layer_errors,
    make_problem,
    measure,
    summarize,
)

WIDTHS = (3, 4, 4, 5)


def quality(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["quality", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_exact_diagonals_are_those_of_double_backward() -> None:
    problem = make_problem(3, examples=10, widths=WIDTHS)  # more than one chunk
    params = list(problem.model.parameters())
    found = exact_diagonals(problem)
    for i in range(len(problem.x)):
        loss = F.cross_entropy(problem.model(problem.x[i : i + 1]), problem.y[i : i + 1])
        for ours, theirs in zip(found, exact_diagonal(loss, params), strict=True):
            torch.testing.assert_close(ours[i], theirs, rtol=1e-10, atol=1e-10)


def test_an_exact_estimator_has_no_error() -> None:
    problem = make_problem(0, examples=2, widths=WIDTHS)
    errors = layer_errors(problem, exact_diagonal, exact_diagonals(problem))
    assert len(errors) == len(WIDTHS) - 1
    assert max(errors) < 1e-10


def test_the_error_of_zero_is_the_norm_of_the_diagonal() -> None:
    result = measure([5], examples=3, widths=WIDTHS)
    exact = exact_diagonals(make_problem(5, examples=3, widths=WIDTHS))
    norm = sum(float(diagonal.abs().sum()) for diagonal in exact) / 3
    (zero,) = (row for row in summarize(result) if row.method == ZERO)
    assert zero.error == pytest.approx(norm)


def test_hesscale_is_nearest_and_exact_in_the_last_layer() -> None:
    result = measure([0, 1], examples=4)
    rows = {row.method: row for row in summarize(result)}
    last = {errors.method: errors.layer_means[-1] for errors in result.methods}
    assert rows[REFERENCE].relative == 1
    assert 3 < rows["BL89"].relative < rows["HesScaleGN"].relative < rows[ZERO].relative < 60
    assert last[REFERENCE] < 1e-12
    assert last["HesScaleGN"] < 1e-12
    assert last["BL89"] > 0.1


def test_same_seeds_give_same_numbers_and_leave_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, second = (measure([7], examples=2, widths=WIDTHS) for _ in range(2))
    assert first == second
    assert torch.equal(before, torch.random.get_rng_state())


def test_command_prints_a_table_and_writes_its_files(tmp_path: Path) -> None:
    out = tmp_path / "new" / "quality"
    code, printed, _ = quality("--seeds", 2, "--examples", 1, "--out", out)
    assert code == 0
    record = json.loads((out / "quality.json").read_text(encoding="utf-8"))
    assert all(row["method"] in printed for row in record["summary"])
    assert record["seeds"] == [0, 1]
    assert record["command"] == f"hesscale quality --seeds 2 --examples 1 --out {out}"
    assert record["environment"]["torch"] == str(torch.__version__)
    assert (out / "quality.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--seeds", "--examples"])
def test_a_count_below_one_is_one_line_and_code_2(option: str, tmp_path: Path) -> None:
    code, _, complaint = quality(option, -3, "--out", tmp_path)
    assert code == 2
    assert complaint == f"hesscale: {option} must be at least 1, not -3\n"


def test_a_folder_that_cannot_be_written_is_one_line_and_code_1(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    code, printed, complaint = quality("--out", tmp_path / "taken" / "quality")
    assert code == 1
    assert printed == ""
    assert complaint.startswith("hesscale: cannot write to ")
    assert complaint.count("\n") == 1


def test_no_seeds_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one seed"):
        measure([], examples=1)


@pytest.mark.parametrize("command", [[], ["quality"]])
def test_help_shows_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Example:\n" in result.stdout
    assert "hesscale quality --seeds 5" in result.stdout
