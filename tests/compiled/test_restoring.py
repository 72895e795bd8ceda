"""What a trace has written is taken back, whatever class holds it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

import hesscale

from .networks import small, square, vectors


class Output(OrderedDict[str, Tensor]):
    """As those of Hugging Face: made of its fields, and not to be updated."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self["y"] = y

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("not to be updated")


def test_an_output_of_its_own_class_may_be_kept_by_the_model() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = small(), None

        def forward(self, x: Tensor) -> Tensor:
            self.last = Output(self.inner(x))  # type: ignore[assignment]
            return self.last["y"]  # type: ignore[index]

    model, x = Keeping(), vectors(6)[0]
    model(x)
    kept = model.last
    step = hesscale.compile(square, model, backend="eager")
    assert step(x) == square(model, x).detach()
    assert type(model.last) is Output and kept is not None
