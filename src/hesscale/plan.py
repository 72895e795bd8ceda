"""Everything about a pass that is known before it runs; whatever is wrong with a graph is found here, not later."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .errors import COMPLEX, OPAQUE, MissingRuleError
from .graph import LEAF, Edge, Graph, Link, Row, edge_of, function_of, graph_behind, hiding, wide
from .regions import Region, Rules, find_regions
from .rules import BL89, RULES
from .rules.fallback import ByAutograd
from .rules.families import NETWORK, Composite, Inner, Rule
from .rules.table import RuleTable
from .traced import is_traced
from .wiring import Wiring, behind, wire

_LOSS_OUTSIDE = (
    "rank= carries the loss's curvature through the network, and cannot cross the border of a compiled region: compile "
    "the two together, torch.compile(loss_fn, backend='hesscale') of a function that calls the model"
)


class Method(NamedTuple):
    """A way to walk: by which rules, and whether the residual is dropped behind the loss."""

    rules: RuleTable
    gauss_newton: bool = False
    name: str | None = None


METHODS = {
    "hesscale": Method(RULES, name="hesscale"),
    "hesscale_gn": Method(RULES, gauss_newton=True, name="hesscale_gn"),
    "bl89": Method(BL89, name="bl89"),
}


def method_named(name: str) -> Method:
    """The method of that name, or an error that lists them all."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: choose one of {', '.join(map(repr, METHODS))}")
    return METHODS[name]


class Question(NamedTuple):
    """What is asked of a graph, beside its rows."""

    method: Method
    version: int  # of the method's table
    start: Link
    seeded: bool
    borders: tuple[Link, ...]  # where the network ends and the loss begins, if the user says so
    targets: tuple[Link, ...] | None  # None: all leaves
    rank: int | str


@dataclass(frozen=True, slots=True)
class Stop:
    """What is to be done at one place."""

    place: int
    rule: Rule
    region: Region | None  # where element-wise paths meet: what it says goes for all of its places
    outputs: tuple[Link, ...]
    inputs: tuple[Link | None, ...]
    wanted: tuple[torch.Size | None, ...]  # shapes of the inputs
    is_loss: bool  # it is handed g, and with it its residual
    is_composite: bool  # it goes through a graph of its own, and is handed g in any case
    is_target: bool  # the curvature of its outputs is asked for, too
    nothing: tuple[None, ...]  # None for each output


@dataclass(frozen=True)
class Plan:
    """Where a pass stops, and what it does there. It holds no node, so that the next pass can use it again."""

    method: Method
    start: Link
    stops: tuple[Stop, ...]  # the root first; leaves and places inside a region are left out
    leaves: tuple[int, ...]
    targets: frozenset[Link]  # edges whose curvature is kept to the end of the pass
    dtypes: Mapping[Link, torch.dtype]  # of curvature: as torch has gradients, but half precision in single

    @property
    def residuals(self) -> frozenset[int]:
        """Places outside of regions whose residual counts."""
        return frozenset(stop.place for stop in self.stops if stop.is_loss and stop.region is None)

    @property
    def is_composite(self) -> bool:
        """Whether there are nodes that stand for graphs of their own."""
        return any(stop.is_composite for stop in self.stops)

    @property
    def aims(self) -> tuple[Link, ...] | None:
        """The targets, or None if all leaves are meant."""
        return tuple(self.targets) or None


def make_plan(
    y: Tensor,
    method: Method,
    *,
    outputs: Sequence[Tensor | GradientEdge] = (),
    seeded: bool = False,
    targets: Sequence[Edge] | None = None,
    fallback: Rule | None = None,
    rank: int | str = 0,
) -> tuple[Plan, Graph]:
    """The graph of ``y``, and the plan of a pass from there to ``targets`` (all leaves if None); raises without one.

    ``seeded``: curvature arrives at ``y`` from outside, so that for Gauss-Newton the loss lies before ``y``.
    ``fallback`` is the rule of operations that have none. ``rank`` is for nodes that stand for graphs of their own.
    """
    root, nr = edge_of(y)
    graph = graph_behind(root)
    borders = [edge_of(tensor) for tensor in outputs]
    if any(node not in graph.places for node, _ in borders):
        raise ValueError("output is not part of the loss's graph: pass the very tensor the loss was computed from")
    question = Question(
        method=method,
        version=method.rules.version,
        start=(0, nr),
        seeded=seeded,
        borders=tuple(map(graph.link, borders)),
        targets=None if targets is None else tuple(graph.link(edge) for edge in targets if edge[0] in graph.places),
        rank=rank,
    )
    if fallback is None and not is_traced():  # sizes may be symbols while tracing, which no table can hold
        return _kept_plan(graph.rows, question), graph
    return _plan(graph.rows, question, fallback), graph


def _plan(rows: tuple[Row, ...], question: Question, fallback: Rule | None = None) -> Plan:
    method, targets = question.method, frozenset(question.targets or ())
    wiring = wire(rows, question.targets)
    rules = look_up(rows, wiring, method.rules, fallback)
    loss = set(wiring.order) - _network(rows, wiring, rules, question) if method.gauss_newton else None
    borders = frozenset(question.borders if method.gauss_newton else ())
    regions = find_regions(wiring, rules, borders, frozenset(loss or ()))
    inner = {place: _inner(place, loss, question, fallback) for place in wiring.order if _is_composite(rules[place])}
    if question.rank and inner:
        _refuse_loss_outside(wiring, rules, [*inner])
    places = {place for place, _ in targets}
    inside = {place for region in regions.values() for place in region.places[1:]}
    stops = [
        Stop(
            place=place,
            rule=rule.within(inner[place]) if isinstance(rule, Composite) else rule,
            region=regions.get(place),
            outputs=tuple((place, nr) for nr in range(len(wiring.shapes[place]))),
            inputs=wiring.edges[place],
            wanted=wiring.wanted[place],
            is_loss=loss is None or place in loss,
            is_composite=place in inner,
            is_target=place in places,
            nothing=(None,) * len(wiring.shapes[place]),
        )
        for place in wiring.order
        if (rule := rules[place]) is not None and place not in inside
    ]
    leaves = tuple(place for place in wiring.order if rules[place] is None)
    return Plan(method, question.start, tuple(stops), leaves, targets, _dtypes(wiring))


# planning costs more than a small network's arithmetic, and graphs repeat from step to step
_kept_plan = functools.lru_cache(maxsize=16)(_plan)


def _dtypes(wiring: Wiring) -> dict[Link, torch.dtype]:
    return {(place, nr): wide(dtype) for place, dtypes in enumerate(wiring.dtypes) for nr, dtype in enumerate(dtypes)}


def look_up(rows: Sequence[Row], wiring: Wiring, table: RuleTable, fallback: Rule | None = None) -> Rules:
    """The rule of every place; raises one error that lists all that are missing."""
    rules, missing, hidden = _found(rows, wiring, table, fallback)
    if missing:
        raise MissingRuleError(missing, hiding=hidden)
    return rules


def _found(
    rows: Sequence[Row], wiring: Wiring, table: RuleTable, fallback: Rule | None
) -> tuple[Rules, Counter[str], Counter[str]]:
    """The rules, which are missing, and which of these nodes hide a graph."""
    rules: list[Rule | None] = [None] * len(rows)
    hidden = hiding(rows)  # also beside the way: what is wanted may be used in there
    missing: Counter[str] = Counter()
    for place in wiring.order:
        name, kind, _, _ = rows[place]
        rule = table.find(name, function_of(kind))
        if rule is None and name != LEAF and name not in OPAQUE and not name.endswith(COMPLEX):
            rule = fallback
        if rule is None and name != LEAF:
            missing[name] += 1
        if isinstance(rule, Composite):
            _, inner, inner_hidden = _found(rule.rows, rule.wiring(wiring.wanted[place]), table, fallback)
            missing, hidden = missing + inner, hidden + inner_hidden
        rules[place] = rule
    return tuple(rules), missing | hidden, hidden


def _is_composite(rule: Rule | None) -> bool:
    return isinstance(rule, Composite)


def _inner(place: int, loss: Set[int] | None, question: Question, fallback: Rule | None) -> Inner:
    """How the pass goes through the graph that this place stands for."""
    name = question.method.name
    assert name is not None
    own = tuple(nr for border, nr in question.borders if border == place)
    if loss is not None and place in loss and question.borders:  # nothing of it is network
        name = "hesscale"
    elif loss is not None and place not in loss and not own:  # nothing of it is loss
        own = NETWORK
    missing = "raise" if fallback is None else "exact" if isinstance(fallback, ByAutograd) else "sample"
    return Inner(name, own if question.method.gauss_newton else (), missing, question.rank)


def _refuse_loss_outside(wiring: Wiring, rules: Rules, composite: Sequence[int]) -> None:
    """ValueError unless the whole loss, and all that lies behind it, is in one of these places."""
    stops = [place for place in wiring.order if rules[place] is not None]
    if stops[-1] != composite[0] or composite[0] in behind_nonlinear(wiring, rules):
        raise ValueError(_LOSS_OUTSIDE)


def _network(rows: Sequence[Row], wiring: Wiring, rules: Rules, question: Question) -> set[int]:
    """Where Gauss-Newton drops the residual: behind ``output``, or else behind the first non-linear operation."""
    if question.borders:
        return behind(question.borders, rows)
    return set(wiring.order) if question.seeded else behind_nonlinear(wiring, rules)


def behind_nonlinear(wiring: Wiring, rules: Rules) -> set[int]:
    """The network: places with a non-linear operation between them and the root. What is before them is the loss."""
    network: set[int] = set()
    for place in wiring.order:
        rule = rules[place]
        if rule is not None and (place in network or _ends_loss(rule, wiring.wanted[place])):
            network.update(link[0] for link in wiring.edges[place] if link is not None)
    return network


def _ends_loss(rule: Rule, wanted: Sequence[torch.Size | None]) -> bool:
    """A non-linear operation does, unless it works on scalars only: those are the loss, weighted or rooted."""
    return not rule.is_linear(wanted) and any(shape is not None and len(shape) for shape in wanted)
