"""Element-wise expressions that part and meet again, such as x*x or x*sigmoid(x), treated as the one function they are.

Node by node, the two paths of x*x would be added as if they were independent: 2x²s instead of 4x²s + 2g. Inside an
element-wise region the Hessian is diagonal, so f' and f'' of the whole region are exact and cheap: its nodes pull back
ones, which gives f', and g, which gives the f'g that is differentiated once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from .graph import Graph, Link
from .rules.calculus import View, added, differentiate, pull
from .rules.families import Rule
from .wiring import Wiring

_LARGEST = 128  # nodes; a larger expression is treated node by node, which keeps the search linear in the graph

Rules = Sequence[Rule | None]
"""By place; None at leaves."""


@dataclass(frozen=True)
class Region:
    """An element-wise function of ``sources``, computed by the nodes at ``places``, the last one computed first."""

    places: tuple[int, ...]
    sources: tuple[Link, ...]


def find_regions(
    wiring: Wiring, rules: Rules, barriers: Set[Link] = frozenset(), whole: Set[int] = frozenset()
) -> dict[int, Region]:
    """The regions of a graph, each under the place where its paths meet.

    Edges in ``barriers`` stay outside. Regions that begin at a place in ``whole`` are not cut at their joints.
    """
    regions: dict[int, Region] = {}
    absorbed: set[int] = set()
    for place in wiring.order:
        if place in absorbed or len(wiring.edges[place]) < 2 or not _is_pointwise(place, wiring, rules):
            continue
        region = _grow(place, wiring, rules, barriers, is_whole=place in whole)
        if region is not None:
            regions[place] = region
            absorbed.update(region.places)
    return regions


def _is_pointwise(place: int, wiring: Wiring, rules: Rules) -> bool:
    rule = rules[place]
    if rule is None or not rule.pointwise or len(wiring.shapes[place]) > 1:
        return False
    # a broadcast input is summed over places, where the first derivatives of several places would mix
    output = wiring.shapes[place][0]
    return all(shape is None or shape == output for shape in wiring.wanted[place])


def _grow(sink: int, wiring: Wiring, rules: Rules, barriers: Set[Link], *, is_whole: bool) -> Region | None:
    """Absorbs producers that only the region consumes, until one source is left or nothing more can be absorbed."""
    sources: dict[Link, None] = {}
    arrived: dict[int, int] = {}
    complete: list[Link] = []  # sources that nothing outside the region reads
    places = [sink]

    def open_inputs(place: int) -> None:
        for link in wiring.edges[place]:
            if link is not None:
                sources[link] = None
                arrived[link[0]] = arrived.get(link[0], 0) + 1
                if arrived[link[0]] == wiring.consumers[link[0]]:
                    complete.append(link)

    open_inputs(sink)
    while len(sources) > 1 and complete and len(places) < _LARGEST:
        link = complete.pop()
        if link not in barriers and _is_pointwise(link[0], wiring, rules):
            places.append(link[0])
            del sources[link]
            open_inputs(link[0])
    return _trimmed(places if is_whole else _without_joints(places, wiring), wiring)


def _links(places: Iterable[int], wiring: Wiring) -> list[Link]:
    return [link for place in places for link in wiring.edges[place] if link is not None]


def _without_joints(places: list[int], wiring: Wiring) -> list[int]:
    """The region without what is behind one of its tensors only: of that tensor it is a function like any other.

    What is cut off may be a region of its own; the fewer nodes and sources one has, the less there is to differentiate.
    """
    for joint in places[1:]:
        behind = {joint}
        for place in places:  # consumers first
            if place in behind:
                behind.update(link[0] for link in _links([place], wiring) if link[0] in places)
        rest = [place for place in places if place not in behind]
        if joint in places and not {*_links(rest, wiring)} & {*_links(behind, wiring)}:
            places = rest
    return places


def _trimmed(places: list[int], wiring: Wiring) -> Region | None:
    """The region without the nodes that do not lead to a meeting, which go their ordinary way; None if none is left."""
    met: dict[Link, bool] = {}  # whether several paths from the sink have met there or on the way
    for place in places:
        for link in _links([place], wiring):
            met[link] = link in met or met.get((place, 0), False)
    inside: set[int] = set()
    for place in reversed(places):
        if any(met[link] or link[0] in inside for link in _links([place], wiring)):
            inside.add(place)
    if not inside:
        return None
    kept = tuple(place for place in places if place in inside)
    return Region(kept, tuple(dict.fromkeys(link for link in _links(kept, wiring) if link[0] not in inside)))


def region_curvatures(
    region: Region,
    graph: Graph,
    s: Tensor | None,
    g: Tensor | None,
    *,
    also: Set[Link] = frozenset(),
    half: Set[int] = frozenset(),
) -> list[tuple[Link, Tensor | None]]:
    """f'² s + f'' g at every source of the region, and at the edges inside it that ``also`` asks for.

    Nodes at places in ``half`` work in half precision.
    """
    seed = s if s is not None else g
    if seed is None:
        return []
    first = _pull_back(region, graph, torch.ones_like(seed), half)
    with torch.enable_grad():
        weighted = {} if g is None else _pull_back(region, graph, g, half)
    links = {link for place in region.places for link in graph.rows[place][2] if link is not None}
    behind = [graph.nodes[place] for place, _ in links if place not in region.places]
    inside = (link for link in first.keys() & also if link[0] in region.places[1:])
    results: list[tuple[Link, Tensor | None]] = []
    for link in (*region.sources, *inside):
        transport = None if s is None or link not in first else s * first[link].square()
        bend = differentiate(weighted.get(link), graph.edge(link), fixed=behind)
        results.append((link, added(transport, bend)))
    return results


def _pull_back(region: Region, graph: Graph, grad: Tensor, half: Set[int]) -> dict[Link, Tensor]:
    """d(Σ grad·y) at every edge of the region."""
    arrived: dict[Link, Tensor] = {(region.places[0], 0): grad}
    for place in region.places:
        own = arrived.get((place, 0))
        if own is None:
            continue
        node = graph.nodes[place]
        for link, pulled in zip(graph.rows[place][2], pull(View(node) if place in half else node, own), strict=True):
            if link is not None and pulled is not None:
                arrived[link] = arrived[link] + pulled if link in arrived else pulled
    return arrived
