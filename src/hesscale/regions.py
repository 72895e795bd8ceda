"""Element-wise expressions that part and meet again, such as x*x or x*sigmoid(x), treated as the one function they are.

Node by node, the two paths of x*x would be added as if they were independent: 2x²s instead of 4x²s + 2g. Inside an
element-wise region the Hessian is diagonal, so f' and f'' of the whole region are exact and cheap: its nodes pull back
ones, which gives f', and g, which gives the f'g that is differentiated once more.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from .graph import LEAF, Edge, Graph, Link
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


def find_regions(wiring: Wiring, rules: Rules, barriers: Set[Link]) -> dict[int, Region]:
    """The regions of a graph, each under the place where its paths meet. Edges in ``barriers`` stay outside."""
    regions: dict[int, Region] = {}
    absorbed: set[int] = set()
    for place in wiring.order:
        if place in absorbed or len(wiring.edges[place]) < 2 or not _is_pointwise(place, wiring, rules):
            continue
        region = _grow(place, wiring, rules, barriers)
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


def _grow(sink: int, wiring: Wiring, rules: Rules, barriers: Set[Link]) -> Region | None:
    """Absorbs producers that only the region consumes, until one source is left or nothing more can be absorbed.

    ``met`` holds the open edges, and whether several paths from the sink have met there or on the way.
    """
    met: dict[Link, bool] = {}
    arrived: dict[int, int] = {}
    complete: list[Link] = []  # open edges that nothing outside the region reads
    places = [sink]

    def open_inputs(place: int, already_met: bool) -> None:
        for link in wiring.edges[place]:
            if link is not None:
                met[link] = already_met or link in met
                arrived[link[0]] = arrived.get(link[0], 0) + 1
                if arrived[link[0]] == wiring.consumers[link[0]]:
                    complete.append(link)

    open_inputs(sink, False)
    while len(met) > 1 and complete and len(places) < _LARGEST:
        link = complete.pop()
        if link not in barriers and _is_pointwise(link[0], wiring, rules):
            places.append(link[0])
            open_inputs(link[0], met.pop(link))
    meetings = {link for link, several in met.items() if several}
    return _trimmed(meetings, places, wiring) if meetings else None


def _trimmed(meetings: set[Link], places: list[int], wiring: Wiring) -> Region:
    """The region without the nodes that do not lead to a meeting: those go their ordinary way."""
    inside: set[int] = set()
    for place in reversed(places):
        if any(link is not None and (link in meetings or link[0] in inside) for link in wiring.edges[place]):
            inside.add(place)
    kept = tuple(place for place in places if place in inside)
    links = (link for place in kept for link in wiring.edges[place] if link is not None and link[0] not in inside)
    return Region(kept, tuple(dict.fromkeys(links)))


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
    sources = [graph.edge(link) for link in region.sources]
    ends = [node for node, _ in sources if node.name() != LEAF]
    sink = graph.nodes[region.places[0]]
    inside = (edge for edge in first if edge not in sources and edge[0] is not sink and graph.link(edge) in also)
    results: list[tuple[Link, Tensor | None]] = []
    for edge in (*sources, *inside):
        transport = None if s is None or edge not in first else s * first[edge].square()
        bend = differentiate(weighted.get(edge), edge, fixed=ends)
        results.append((graph.link(edge), added(transport, bend)))
    return results


def _pull_back(region: Region, graph: Graph, grad: Tensor, half: Set[int]) -> dict[Edge, Tensor]:
    """d(Σ grad·y) at every edge of the region."""
    arrived: dict[Edge, Tensor] = {(graph.nodes[region.places[0]], 0): grad}
    for place in region.places:
        node = graph.nodes[place]
        if (node, 0) not in arrived:
            continue
        seen = View(node) if place in half else node
        for (child, nr), pulled in zip(node.next_functions, pull(seen, arrived[node, 0]), strict=True):
            if child is not None and pulled is not None:
                edge = (child, nr)
                arrived[edge] = arrived[edge] + pulled if edge in arrived else pulled
    return arrived
