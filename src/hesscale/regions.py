"""Element-wise expressions that part and meet again, such as x*x or x*sigmoid(x), treated as the one function they are.

Node by node, the two paths of x*x would be added as if they were independent: 2x²s instead of 4x²s + 2g. Inside an
element-wise region the Hessian is diagonal, so f' and f'' of the whole region are exact and cheap: its nodes pull back
ones, which gives f', and g, which gives the f'g that a nested backward differentiates once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .graph import LEAF, Edge, Graph
from .rules.calculus import added, differentiate, in_single_precision, pull
from .rules.families import Rule

_LARGEST = 128  # nodes; a larger expression is treated node by node, which keeps the search linear in the graph


@dataclass(frozen=True)
class Region:
    """An element-wise function of ``sources``, computed by ``nodes``, the last one computed first."""

    nodes: tuple[Node, ...]
    sources: tuple[Edge, ...]


def find_regions(graph: Graph, rules: Mapping[Node, Rule], barriers: Set[Edge]) -> dict[Node, Region]:
    """The regions of a graph, each under the node where its paths meet. Edges in ``barriers`` stay outside."""
    regions: dict[Node, Region] = {}
    absorbed: set[Node] = set()
    for node in graph.order:
        if node in absorbed or len(graph.edges[node]) < 2 or not _is_pointwise(node, graph, rules):
            continue
        region = _grow(node, graph, rules, barriers)
        if region is not None:
            regions[node] = region
            absorbed.update(region.nodes)
    return regions


def _is_pointwise(node: Node, graph: Graph, rules: Mapping[Node, Rule]) -> bool:
    rule = rules.get(node)
    if rule is None or not rule.pointwise:
        return False
    # a broadcast input is summed over places, where the first derivatives of several places would mix
    output = graph.shapes[node][0]
    return all(shape is None or shape == output for shape in graph.wanted[node])


def _grow(sink: Node, graph: Graph, rules: Mapping[Node, Rule], barriers: Set[Edge]) -> Region | None:
    """Absorbs producers that only the region consumes, until one source is left or nothing more can be absorbed.

    ``met`` holds the open edges, and whether several paths from the sink have met there or on the way.
    """
    met: dict[Edge, bool] = {}
    arrived: dict[Node, int] = {}
    complete: list[Edge] = []  # open edges that nothing outside the region reads
    nodes = [sink]

    def open_inputs(node: Node, already_met: bool) -> None:
        for edge in graph.edges[node]:
            if edge is not None:
                met[edge] = already_met or edge in met
                arrived[edge[0]] = arrived.get(edge[0], 0) + 1
                if arrived[edge[0]] == graph.consumers[edge[0]]:
                    complete.append(edge)

    open_inputs(sink, False)
    while len(met) > 1 and complete and len(nodes) < _LARGEST:
        edge = complete.pop()
        if edge not in barriers and _is_pointwise(edge[0], graph, rules):
            nodes.append(edge[0])
            open_inputs(edge[0], met.pop(edge))
    meetings = {edge for edge, several in met.items() if several}
    return _leading_to(meetings, nodes, graph) if meetings else None


def _leading_to(meetings: set[Edge], nodes: list[Node], graph: Graph) -> Region:
    """The region without the nodes that do not lead to a meeting: those go their ordinary way."""
    inside: set[Node] = set()
    for node in reversed(nodes):
        if any(edge is not None and (edge in meetings or edge[0] in inside) for edge in graph.edges[node]):
            inside.add(node)
    kept = tuple(node for node in nodes if node in inside)
    edges = (edge for node in kept for edge in graph.edges[node] if edge is not None and edge[0] not in inside)
    return Region(kept, tuple(dict.fromkeys(edges)))


def region_curvatures(
    region: Region, s: Tensor | None, g: Tensor | None, also: Set[Edge] = frozenset()
) -> list[tuple[Edge | None, Tensor | None]]:
    """f'² s + f'' g at every source of the region, and at the edges inside it that ``also`` asks for."""
    seed = s if s is not None else g
    if seed is None:
        return []
    first = _pull_back(region, torch.ones_like(seed))
    with torch.enable_grad():
        weighted = {} if g is None else _pull_back(region, g)
    ends = [node for node, _ in region.sources if node.name() != LEAF]
    results: list[tuple[Edge | None, Tensor | None]] = []
    inside = (edge for edge in first if edge in also and edge not in region.sources and edge[0] is not region.nodes[0])
    for edge in (*region.sources, *inside):
        transport = None if s is None or edge not in first else s * first[edge].square()
        results.append((edge, added(transport, differentiate(weighted.get(edge), edge, fixed=ends))))
    return results


def _pull_back(region: Region, grad: Tensor) -> dict[Edge, Tensor]:
    """d(Σ grad·y) at every edge of the region."""
    arrived: dict[Edge, Tensor] = {(region.nodes[0], 0): grad}
    for node in region.nodes:
        if (node, 0) not in arrived:
            continue
        for (child, nr), pulled in zip(
            node.next_functions, pull(in_single_precision(node), arrived[node, 0]), strict=True
        ):
            if child is not None and pulled is not None:
                edge = (child, nr)
                arrived[edge] = arrived[edge] + pulled if edge in arrived else pulled
    return arrived
