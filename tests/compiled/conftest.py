"""What all tests of compiled regions share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def no_compilations_before() -> Iterator[None]:
    """Each test begins afresh, with recurrent layers inside of regions, and hooks that come later are seen."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True, skip_nnmodule_hook_guards=False):
        yield
    torch._dynamo.reset()
