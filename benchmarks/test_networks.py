"""One training step of AdaHesScale over one of Adam, for networks of the sizes people train.

$ pytest benchmarks/test_networks.py --benchmark-columns=median,rounds

Limits are generous: these are guards against something going wrong. ``hesscale cost`` measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from networks import NETWORKS
from ratios import ratio

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
