"""What the supported versions of torch do not have in common: the one place where the tests know it."""

from __future__ import annotations

import torch

NOT_EVERYWHERE = frozenset(
    {
        # not in the oldest
        "AminmaxBackward0",
        "LdexpBackward0",
        "NarrowCopyBackward0",
        # in the newest only
        "LinalgMatrixSqrthBackward0",
        "LinalgPolarBackward0",
        "SpecialBesselJ0Backward0",
        "SpecialBesselJ1Backward0",
        "SpecialBesselY0Backward0",
        "SpecialBesselY1Backward0",
        "SpecialModifiedBesselI0Backward0",
        "SpecialModifiedBesselI1Backward0",
        "SpecialModifiedBesselK0Backward0",
        "SpecialModifiedBesselK1Backward0",
        # no longer in the newest
        "CholeskyBackward0",
    }
)
"""Nodes with a rule that only some versions record."""


TWICE_NOT_EVERYWHERE = {
    "GridSampler2DBackward0": "GridSampler2DBackwardBackward0",
    "GridSampler3DBackward0": "GridSampler3DBackwardBackward0",
}
"""Nodes whose rule is autograd's second derivative, with the node of that derivative: no rule where torch has none."""

OLDEST = torch.__version__.startswith("2.10.")


def has_node(name: str) -> bool:
    """Whether the installed torch can record this node; every node that is not listed above must be there."""
    return name not in NOT_EVERYWHERE or name in dir(torch._C._functions)


def has_rule(name: str) -> bool:
    """Whether a node with a row among the cases has a rule with the installed torch."""
    return TWICE_NOT_EVERYWHERE.get(name, name) in dir(torch._C._functions) or name not in TWICE_NOT_EVERYWHERE
