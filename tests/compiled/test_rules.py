"""Every rule gives in compiled code what it gives without."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import hesscale
from hesscale.double_backward import unfused
from hesscale.rules import RULES

from ..rules.case import Case
from ..rules.cases import CASES
from .networks import compiled, loss_of_case

NO_FAKE_KERNEL = {"CtcLossBackward0", "CtcLossBackward1", "LinalgLstsqBackward0", "PackPaddedSequenceBackward0"}
"""Operations whose outputs have sizes or values that torch cannot tell without data: no compiler takes them."""

RANDOM = {"NativeDropoutBackward0", "RreluWithNoiseBackward0", "RreluWithNoiseBackward1"}
"""Operations that draw other numbers when they are compiled."""

ONE_PER_RULE = [
    *{RULES[case.node]: case for case in reversed(CASES) if case.node not in NO_FAKE_KERNEL | RANDOM}.values()
]
"""Nodes that share a rule share its code; the smallest number of cases that sees all of it."""

WITH_NUMBERS = [case for case in CASES if "number" in case.label]

SIZE = 8
GROUPS = [(ONE_PER_RULE + WITH_NUMBERS)[start : start + SIZE] for start in range(0, len(ONE_PER_RULE), SIZE)]


@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: cases[0].label)
def test_every_rule(cases: Sequence[Case]) -> None:
    """Several cases are one loss, since a compilation takes a second."""
    model = nn.Module()
    tensors = [[value for value in case.inputs if isinstance(value, Tensor)] for case in cases]
    losses = [loss_of_case(case) for case in cases]

    def loss_fn(tensors: Sequence[Sequence[Tensor]]) -> Tensor:
        return sum((loss(model, *given) for loss, given in zip(losses, tensors, strict=True)), torch.zeros(()))

    leaves = [value for given in tensors for value in given if value.requires_grad]
    with unfused(model):
        expected = hesscale.diagonal(loss_fn(tensors), leaves)
    found = hesscale.diagonal(compiled(loss_fn)(tensors), leaves)
    labels = [case.label for case, given in zip(cases, tensors, strict=True) for value in given if value.requires_grad]
    for label, ours, eager in zip(labels, found, expected, strict=True):
        torch.testing.assert_close(
            ours, eager, rtol=1e-10, atol=1e-10, msg=lambda text, label=label: f"{label}: {text}"
        )
