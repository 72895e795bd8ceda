"""docs/coverage.md says what the rule table says."""

from pathlib import Path

import pytest

from hesscale_lab.coverage import as_markdown, measure

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


@pytest.mark.filterwarnings("ignore")
def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == as_markdown(measure()), "run `hesscale coverage`"
