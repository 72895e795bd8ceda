"""The rule table: what may be registered again, replaced, or registered for a while."""

from __future__ import annotations

import pytest
import torch

import hesscale
from hesscale import Selection
from hesscale.rules import BL89, RULES, registered
from hesscale.rules.families import Coupled, Elementwise
from hesscale.rules.table import RuleTable

from .case import randn

TANH = "TanhBackward0"


def test_the_same_rule_may_be_registered_again() -> None:
    table, rule = RuleTable(), Selection()
    table.register(rule, "A", "B")
    table.register(rule, "B")
    table.register(Selection(), "A")  # equal, as when the cell of a notebook runs twice
    assert table["A"] == rule


def test_another_rule_needs_replace() -> None:
    table = RuleTable({"A": Selection()})
    with pytest.raises(ValueError, match="already registered: A; pass replace=True"):
        table.register(Elementwise(), "A")
    table.register(Elementwise(), "A", replace=True)
    assert table["A"] == Elementwise()


def test_every_change_has_a_version() -> None:
    """Plans are kept by version: a change that goes unnoticed would leave the old rule in use."""
    table = RuleTable({"A": Selection()})
    above = table.overlay({"B": Selection()})
    seen = {above.version}
    for change in (
        lambda: table.register(Elementwise(), "A", replace=True),
        lambda: table.register(Selection(), "A", replace=True),
        lambda: table.register(Selection(), "C"),
        lambda: above.register(Selection(), "D"),
    ):
        change()
        assert above.version not in seen
        seen.add(above.version)


IDENTITY = Coupled(lambda node, s, g: s, linear=True)


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
def test_registered_for_a_while(method: str) -> None:
    """Also where a plan of the same graph is kept already, and after an error."""
    x = randn(3)

    def found() -> torch.Tensor:
        (curvature,) = hesscale.diagonal(torch.tanh(x).square().sum(), x, method=method)
        assert curvature is not None
        return curvature

    before, version = found(), RULES.version
    with pytest.raises(KeyError), registered(IDENTITY, TANH):
        assert torch.equal(found(), torch.full_like(x, 2.0))
        raise KeyError
    assert torch.equal(found(), before)
    assert RULES.version > version
    assert RULES[TANH] is BL89[TANH]


def test_registered_leaves_no_row_behind() -> None:
    class Own(torch.autograd.Function):
        pass

    with registered(Selection(), "NobodysBackward0", Own):
        assert RULES[Own] == RULES["NobodysBackward0"] == Selection()
    assert Own not in RULES
    assert "NobodysBackward0" not in RULES
