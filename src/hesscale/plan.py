"""Everything about a pass that is known before it runs; whatever is wrong with a graph is found here, not later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .errors import OPAQUE, MissingRuleError
from .graph import LEAF, Edge, Graph, behind, edge_of, prepare_saved, trace
from .regions import Region, find_regions
from .rules import BL89, RULES
from .rules.families import Rule
from .rules.table import RuleTable


@dataclass(frozen=True)
class Method:
    """A way to walk: by which rules, and whether the residual is dropped behind the loss."""

    rules: RuleTable
    gauss_newton: bool = False


METHODS = {
    "hesscale": Method(RULES),
    "hesscale_gn": Method(RULES, gauss_newton=True),
    "bl89": Method(BL89),
}


def method_named(name: str) -> Method:
    """The method of that name, or an error that lists them all."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: choose one of {', '.join(map(repr, METHODS))}")
    return METHODS[name]


@dataclass(frozen=True)
class Plan:
    """The nodes to visit and what to do at each."""

    method: Method
    graph: Graph
    visits: tuple[Node, ...]  # the root first; nodes inside a region are left out
    rules: dict[Node, Rule]
    loss: frozenset[Node]  # nodes that are handed g, and with it their residual
    regions: dict[Node, Region]
    targets: frozenset[Edge]  # edges whose curvature is kept to the end of the pass


def make_plan(
    y: Tensor,
    method: Method,
    *,
    outputs: Sequence[Tensor] = (),
    seeded: bool = False,
    targets: Sequence[Edge] | None = None,
    fallback: Rule | None = None,
) -> Plan:
    """The plan of a pass from ``y`` to ``targets`` (all leaves if None); raises if the pass cannot be made.

    ``seeded``: curvature arrives at ``y`` from outside, so that for Gauss-Newton the loss lies before ``y``.
    ``fallback`` is the rule of operations that have none.
    """
    graph = trace(edge_of(y), targets)
    rules = look_up(graph, method.rules, fallback)
    prepare_saved(graph)
    borders = [edge_of(tensor) for tensor in outputs]
    if any(node not in graph.edges for node, _ in borders):
        raise ValueError("output is not part of the loss's graph: pass the very tensor the loss was computed from")
    loss = frozenset(graph.order)
    if method.gauss_newton:
        loss -= behind(borders) if borders else _behind_nonlinear(graph, rules, seeded)
    regions = find_regions(graph, rules, frozenset(borders if method.gauss_newton else ()))
    inside = {node for region in regions.values() for node in region.nodes[1:]}
    visits = tuple(node for node in graph.order if node not in inside)
    return Plan(method, graph, visits, rules, loss, regions, frozenset(targets or ()))


def look_up(graph: Graph, table: RuleTable, fallback: Rule | None = None) -> dict[Node, Rule]:
    """The rule of every node; raises one error that lists all that are missing."""
    rules: dict[Node, Rule] = {}
    missing: Counter[str] = Counter()
    for node in graph.order:
        name = node.name()
        rule = table.find(name, getattr(type(node), "_forward_cls", None))
        if rule is None and name != LEAF and name not in OPAQUE:
            rule = fallback
        if rule is not None:
            rules[node] = rule
        elif name != LEAF:
            missing[name] += 1
    if missing:
        raise MissingRuleError(missing)
    return rules


def _behind_nonlinear(graph: Graph, rules: dict[Node, Rule], seeded: bool) -> set[Node]:
    """The network: nodes with a non-linear operation between them and the start. What is before them is the loss."""
    if seeded:
        return set(graph.order)
    network: set[Node] = set()
    for node in graph.order:
        if node in rules and (node in network or _ends_loss(rules[node], graph.wanted[node])):
            network.update(edge[0] for edge in graph.edges[node] if edge is not None)
    return network


def _ends_loss(rule: Rule, wanted: Sequence[torch.Size | None]) -> bool:
    """A non-linear operation does, unless it works on scalars only: those are the loss, weighted or rooted."""
    return not rule.is_linear(wanted) and any(shape is not None and len(shape) for shape in wanted)
