"""What lies between a loss and the tensors whose curvature is wanted, as plain data: order, shapes, who feeds whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .graph import Link, Row


@dataclass(frozen=True)
class Wiring:
    """The graph from its root to the targets, by place."""

    names: tuple[str, ...]
    order: tuple[int, ...]  # each place after all places that consume its output
    shapes: tuple[tuple[torch.Size, ...], ...]  # of a node's outputs
    dtypes: tuple[tuple[torch.dtype, ...], ...]  # of a node's outputs
    edges: tuple[tuple[Link | None, ...], ...]  # inputs of a node; None where nothing wanted lies behind
    wanted: tuple[tuple[torch.Size | None, ...], ...]  # shapes of those inputs
    consumers: tuple[int, ...]  # how many edges lead to a node


def wire(rows: Sequence[Row], targets: Sequence[Link] | None = None) -> Wiring:
    """The graph from its root to ``targets`` (to all leaves if None), in an order fit for one sweep."""
    inputs = [row[2] for row in rows]
    consumers = [0] * len(rows)
    for link in (link for links in inputs for link in links if link is not None):
        consumers[link[0]] += 1
    order = _consumers_first(inputs, consumers)
    useful = None if targets is None else _leading_to(targets, order, inputs)
    shapes = tuple(tuple(torch.Size(shape) for shape, _, _ in row[3]) for row in rows)
    edges = tuple(tuple(link if useful is None or link in useful else None for link in links) for links in inputs)
    wanted = tuple(tuple(None if link is None else shapes[link[0]][link[1]] for link in links) for links in edges)
    return Wiring(
        names=tuple(row[0] for row in rows),
        order=tuple(place for place in order if useful is None or any(edges[place])),
        shapes=shapes,
        dtypes=tuple(tuple(dtype for _, dtype, _ in row[3]) for row in rows),
        edges=edges,
        wanted=wanted,
        consumers=tuple(consumers),
    )


def _consumers_first(inputs: Sequence[Sequence[Link | None]], consumers: Sequence[int]) -> list[int]:
    waiting = list(consumers)
    ready, order = [0], []
    while ready:
        place = ready.pop()
        order.append(place)
        for link in inputs[place]:
            if link is not None:
                waiting[link[0]] -= 1
                if not waiting[link[0]]:
                    ready.append(link[0])
    return order


def _leading_to(targets: Iterable[Link], order: Sequence[int], inputs: Sequence[Sequence[Link | None]]) -> set[Link]:
    """All edges that are a target or have one behind them."""
    useful = set(targets)
    working: set[int] = set()
    for place in reversed(order):
        if any(link is not None and (link in useful or link[0] in working) for link in inputs[place]):
            working.add(place)
    useful.update(link for links in inputs for link in links if link is not None and link[0] in working)
    return useful


def behind(links: Iterable[Link], rows: Sequence[Row]) -> set[int]:
    """The places of all nodes the given edges were computed by."""
    found: set[int] = set()
    stack = [place for place, _ in links]
    while stack:
        place = stack.pop()
        if place not in found:
            found.add(place)
            stack.extend(link[0] for link in rows[place][2] if link is not None)
    return found
