"""What a trace has written is taken back, whatever class holds it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
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


class Meter:
    count = 0

    def __init__(self) -> None:
        self.total, self.last, self.seen = 0.0, None, []  # type: ignore[var-annotated]

    def update(self, loss: Tensor) -> None:
        self.total, self.last = self.total + loss.item(), loss.detach()
        self.seen.append(loss)
        type(self).count += 1
        Meter.count += 1


@dataclass(slots=True)
class SlottedMeter:
    last: Any = None


CALLS = 0


def test_nothing_of_a_trace_stays_around_the_loss() -> None:
    meter, slotted, total, losses = Meter(), SlottedMeter(), 0.0, []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        global CALLS
        nonlocal total
        loss = square(model, x)
        meter.update(loss)
        slotted.last = loss
        CALLS += 1
        total += loss.item()
        losses.append(loss)
        return loss

    step = hesscale.compile(loss_fn, small(), backend="eager")
    for _ in range(3):
        step(vectors(6)[0])
    assert step.compilations == 1
    assert (meter.total, meter.last, meter.seen, Meter.count) == (0.0, None, [], 0)
    assert (slotted.last, CALLS, total, losses) == (None, 0, 0.0, [])
