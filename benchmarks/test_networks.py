"""A training step of AdaHesScale over one of Adam, for networks of the sizes people train, and recurrent layers alone.

$ pytest benchmarks/test_networks.py --benchmark-columns=median,rounds

Limits are generous: these are guards against something going wrong. ``hesscale cost`` measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from networks import NETWORKS, RECURRENT, recurrent_losses
from ratios import ratio

import hesscale
from hesscale_lab.processes import threads
from hesscale_lab.studies.cost_steps import METHODS, UNIT, known_warnings

LIMITS = {"mlp": 2.5, "wide": 2.0, "3c3d": 2.5, "resnet18": 3.0, "transformer": 3.2, "lstm": 9.0}
"""By network, for every optimizer below."""

_METHODS = {method.name: method for method in METHODS}
_OURS = ("AdaHesScale", "AdaHesScaleGN")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """One thread, and no warnings that are known."""
    with threads(1), known_warnings():
        yield


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("optimizer", _OURS)
def test_step(optimizer: str, network: str, benchmark: Any) -> None:
    """The whole step: forward, backward with curvature, update, clearing."""
    torch.manual_seed(0)
    ours, unit = (_METHODS[name].step(NETWORKS[network]()) for name in (optimizer, UNIT))
    found = ratio(benchmark, ours, unit, rounds=5)
    assert found is None or found <= LIMITS[network]


RECURRENT_LIMITS = {"LSTM": (14.0, 3.5), "GRU": (9.0, 9.0), "RNN": (9.0, 9.0)}
"""Of a pass over the plain backward of the same layer, and over that of its cells written out, at 128 units."""


@pytest.mark.parametrize("unit", ["layer", "cells"])
@pytest.mark.parametrize("steps", [16, 64, 256])
@pytest.mark.parametrize("width", [16, 128])
@pytest.mark.parametrize("kind", RECURRENT)
def test_pass_over_a_recurrent_layer(kind: str, width: int, steps: int, unit: str, benchmark: Any) -> None:
    """``hesscale.backward`` alone, batch 16; torch fuses LSTMs on a CPU, while GRUs and RNNs are single steps there."""
    torch.manual_seed(0)
    fused, cells = recurrent_losses(kind, width, steps)
    plain = fused if unit == "layer" else cells
    found = ratio(
        benchmark,
        lambda: hesscale.backward(fused, retain_graph=True),
        lambda: plain.backward(retain_graph=True),
        rounds=7,
    )
    assert found is None or width < 128 or found <= RECURRENT_LIMITS[kind][unit == "cells"]
