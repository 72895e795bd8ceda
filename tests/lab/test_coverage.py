"""docs/coverage.md says what the rule table says."""

from pathlib import Path

import pytest
import torch

from hesscale_lab.cli.coverage import as_markdown, measure

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


@pytest.mark.filterwarnings("ignore")
def test_page_is_up_to_date() -> None:
    if f"torch {torch.__version__.split('+')[0]}:" not in PAGE.read_text():
        pytest.skip("the page is about another version of torch")
    assert PAGE.read_text() == as_markdown(measure()), "run `hesscale coverage`"
