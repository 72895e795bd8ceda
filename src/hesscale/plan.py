"""Everything about a pass that is known before it runs; whatever is wrong with a graph is found here, not later."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import OPAQUE, MissingRuleError
from .graph import LEAF, Columns, Edge, Graph, Link, Row, Wiring, behind, edge_of, saved_names, trace, wire
from .outer import transposed
from .regions import Region, Rules, find_regions
from .rules import BL89, RULES
from .rules.calculus import LOW_PRECISION
from .rules.families import Bilinear, Rebuilt, Rule, Selection
from .rules.table import RuleTable


class Method(NamedTuple):
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


class Question(NamedTuple):
    """What is asked of a graph, beside its rows."""

    method: Method
    version: int  # of the method's table
    start: Link
    seeded: bool
    borders: tuple[Link, ...]  # where the network ends and the loss begins, if the user says so
    targets: tuple[Link, ...] | None  # None: all leaves


@dataclass(frozen=True, slots=True)
class Stop:
    """What is to be done at one place."""

    place: int
    rule: Rule | None  # None at a leaf
    region: Region | None  # where element-wise paths meet: what it says goes for all of its places
    outputs: tuple[Link, ...]
    output: Link | None  # if it is the only one, and its curvature is for nobody else
    inputs: tuple[Link | None, ...]
    wanted: tuple[torch.Size | None, ...]  # shapes of the inputs
    dtypes: tuple[torch.dtype | None, ...]  # of their curvature
    is_loss: bool  # it is handed g, and with it its residual
    is_half: bool  # it works in half precision
    is_plain: bool  # its rule is all there is to call
    no_gradient: tuple[None, ...]  # g where it is handed none, one per output
    train: tuple[Stop, ...]  # stops behind it that need not wait for torch, in order; empty at those themselves
    ends: tuple[tuple[int, Link], ...]  # leaves behind those, and the curvature each gets


@dataclass(frozen=True)
class Plan:
    """Where a pass stops, and what it does there. It holds no node, so that the next pass can use it again."""

    method: Method
    start: Link
    stops: tuple[Stop, ...]  # the root first; places inside a region are left out
    waiting: tuple[Stop, ...]  # those that wait for torch, without the root
    ahead: frozenset[int]  # places that follow others
    leaves: tuple[int, ...]  # the places of leaves, without the root
    saved: tuple[tuple[int, str], ...]  # tensors that rules may read: whose, and their names
    targets: frozenset[Link]  # edges whose curvature is kept to the end of the pass
    dtypes: dict[Link, torch.dtype]  # of curvature: as torch has gradients, but half precision in single
    owner: int | None  # the first leaf: a workspace lives as long as it


def make_plan(
    y: Tensor,
    method: Method,
    *,
    outputs: Sequence[Tensor] = (),
    seeded: bool = False,
    targets: Sequence[Edge] | None = None,
    fallback: Rule | None = None,
) -> tuple[Plan, Graph]:
    """The graph of ``y``, and the plan of a pass from there to ``targets`` (all leaves if None); raises without one.

    ``seeded``: curvature arrives at ``y`` from outside, so that for Gauss-Newton the loss lies before ``y``.
    ``fallback`` is the rule of operations that have none.
    """
    root, nr = edge_of(y)
    graph = trace(root)
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
    )
    columns = graph.columns
    return (_plan(columns, question) if fallback is None else _new_plan(columns, question, fallback)), graph


def _new_plan(columns: Columns, question: Question, fallback: Rule | None = None) -> Plan:
    method, rows = question.method, columns.rows()
    wiring = wire(rows, question.targets)
    rules = look_up(rows, wiring.order, method.rules, fallback)
    loss = frozenset(wiring.order)
    if method.gauss_newton:
        loss -= behind(question.borders, rows) if question.borders else _behind_nonlinear(wiring, rules, question)
    regions = find_regions(wiring, rules, frozenset(question.borders if method.gauss_newton else ()))
    inside = {place for region in regions.values() for place in region.places[1:]}
    ahead = _ahead(rows, wiring, rules, loss) - inside - regions.keys()
    dtypes, targets = _dtypes(wiring), frozenset(question.targets or ())
    kept = [place for place in wiring.order if place not in inside]
    stops = _stops(kept, wiring, rules, regions, ahead=ahead, loss=loss, dtypes=dtypes, targets=targets)
    return Plan(
        method=method,
        start=question.start,
        stops=stops,
        waiting=tuple(stop for stop in stops if stop.place and stop.place not in ahead),
        ahead=ahead,
        leaves=tuple(place for place in wiring.order[1:] if rules[place] is None),
        saved=tuple((place, name) for place in wiring.order for name in saved_names(rows[place][1])),
        targets=targets,
        dtypes=dtypes,
        owner=next((place for place in wiring.order if rules[place] is None), None),
    )


def _stops(
    places: Sequence[int],
    wiring: Wiring,
    rules: Rules,
    regions: Mapping[int, Region],
    *,
    ahead: frozenset[int],
    loss: frozenset[int],
    dtypes: Mapping[Link, torch.dtype],
    targets: frozenset[Link],
) -> tuple[Stop, ...]:
    """One stop per place, in the order of ``places``."""
    stops: dict[int, Stop] = {}
    trains: dict[int, tuple[Stop, ...]] = {}
    for place in reversed(places):  # those behind first
        region = regions.get(place)
        rule, inputs = _rule_and_inputs(place, wiring, rules, ahead=ahead, targets=targets)
        sources = inputs if region is None else region.sources
        next_ones = [stops[link[0]] for link in sources if link is not None and link[0] in ahead]
        trains[place] = tuple(stop for one in next_ones for stop in (one, *trains[one.place]))
        is_half = wiring.dtypes[place][0] in LOW_PRECISION
        outputs = tuple((place, nr) for nr in range(len(wiring.shapes[place])))
        stops[place] = Stop(
            place=place,
            rule=rule,
            region=region,
            outputs=outputs,
            output=outputs[0] if len(outputs) == 1 and outputs[0] not in targets else None,
            inputs=inputs,
            wanted=wiring.wanted[place],
            dtypes=tuple(None if link is None else dtypes[link] for link in inputs),
            is_loss=place in loss,
            is_half=is_half,
            is_plain=not (rule is None or is_half or region is not None or isinstance(rule, Rebuilt)),
            no_gradient=(None,) * len(wiring.shapes[place]),
            train=() if place in ahead else tuple(stop for stop in trains[place] if stop.rule is not None),
            ends=tuple((stop.place, stop.outputs[0]) for stop in trains[place] if stop.rule is None),
        )
    return tuple(reversed(stops.values()))


def _rule_and_inputs(
    place: int, wiring: Wiring, rules: Rules, *, ahead: frozenset[int], targets: frozenset[Link]
) -> tuple[Rule | None, tuple[Link | None, ...]]:
    """As the wiring has them, but past a transpose that the rule can do without, as every linear layer has one."""
    rule, inputs = rules[place], wiring.edges[place]
    if not isinstance(rule, Bilinear) or rule.turned is None:
        return rule, inputs
    last = inputs[-1]
    if last is None or last in targets or last[0] not in ahead:
        return rule, inputs
    before = rules[last[0]]
    if not isinstance(before, Selection) or before.by is not transposed:
        return rule, inputs
    return replace(rule, backward=rule.turned), (*inputs[:-1], *wiring.edges[last[0]])


def _dtypes(wiring: Wiring) -> dict[Link, torch.dtype]:
    return {
        (place, nr): torch.float32 if dtype in LOW_PRECISION else dtype
        for place, dtypes in enumerate(wiring.dtypes)
        for nr, dtype in enumerate(dtypes)
    }


# planning costs more than a small network's arithmetic, and graphs repeat from step to step
_plan = functools.lru_cache(maxsize=16)(_new_plan)


def look_up(rows: Sequence[Row], order: Sequence[int], table: RuleTable, fallback: Rule | None = None) -> Rules:
    """The rule of every place; raises one error that lists all that are missing."""
    rules: list[Rule | None] = [None] * len(rows)
    missing: Counter[str] = Counter()
    for place in order:
        name, kind, _, _ = rows[place]
        rule = table.find(name, getattr(kind, "_forward_cls", None))
        if rule is None and name != LEAF and name not in OPAQUE:
            rule = fallback
        if rule is None and name != LEAF:
            missing[name] += 1
        rules[place] = rule
    if missing:
        raise MissingRuleError(missing)
    return tuple(rules)


def _ahead(rows: Sequence[Row], wiring: Wiring, rules: Rules, loss: frozenset[int]) -> frozenset[int]:
    """Places with one consumer and no use for g. Not on several devices: there torch's own order is the safe one."""
    if len({device for place in wiring.order for _, _, device in rows[place][3]}) > 1:
        return frozenset()
    alone = (place for place in wiring.order[1:] if wiring.consumers[place] == 1)
    return frozenset(place for place in alone if not _waits(rules[place], wiring.wanted[place], place in loss))


def _waits(rule: Rule | None, wanted: Sequence[torch.Size | None], is_loss: bool) -> bool:
    """Activations wait even without need for g: what torch reads next is then still in the cache."""
    if rule is None:
        return False
    return (is_loss and rule.needs_gradient) or (rule.pointwise and not rule.is_linear(wanted))


def _behind_nonlinear(wiring: Wiring, rules: Rules, question: Question) -> set[int]:
    """The network: nodes with a non-linear operation between them and the start. What is before them is the loss."""
    if question.seeded:
        return set(wiring.order)
    network: set[int] = set()
    for place in wiring.order:
        rule = rules[place]
        if rule is not None and (place in network or _ends_loss(rule, wiring.wanted[place])):
            network.update(link[0] for link in wiring.edges[place] if link is not None)
    return network


def _ends_loss(rule: Rule, wanted: Sequence[torch.Size | None]) -> bool:
    """A non-linear operation does, unless it works on scalars only: those are the loss, weighted or rooted."""
    return not rule.is_linear(wanted) and any(shape is not None and len(shape) for shape in wanted)
