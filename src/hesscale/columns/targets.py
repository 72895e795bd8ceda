"""Where columns end: Σ_n (J_nᵀ u_n)² at one parameter or tensor, each example's gradient squared on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..graph import Edge, Graph, nested_gradients
from ..rules.calculus import widened
from ..wiring import Wiring
from .batch_layout import Examples, Layout, Mixed, follow
from .squares import VIEWS, Use, summed_squares, use_at

Views = tuple[tuple[Node, int], ...]


@dataclass(frozen=True)
class Target:
    """A tensor whose squares are wanted, and what has to be known for them.

    Without ``uses`` the squares are those of the gradient of the tensor itself: right if its own elements belong to
    single examples, a square of the whole batch's gradient if examples are ``mixed``.
    """

    edge: Edge
    count: int  # examples, or groups of them, that are squared apart
    uses: tuple[Use, ...] = ()
    mixed: Mixed | None = None

    @property
    def edges(self) -> list[Edge]:
        """Where gradients are needed."""
        return [(use.node, 0) for use in self.uses] or [self.edge]

    def squares(self, gradients: Sequence[Tensor | None], shape: torch.Size) -> Tensor | None:
        """Σ_n of squares, from the gradients at ``edges``; None if none of them was reached."""
        if not self.uses:
            v = gradients[0]
            return None if v is None else widened(v.to_dense() if v.is_sparse else v).square()
        reached = [(use, v) for use, v in zip(self.uses, gradients, strict=True) if v is not None]
        if len(reached) < 2:
            return reached[0][0].squares(reached[0][1]) if reached else None
        return summed_squares([use.gradients(v) for use, v in reached], reached[0][0].split, shape).contiguous()


def find_targets(
    graph: Graph, wiring: Wiring, seeds: Mapping[Edge, Layout], wanted: Sequence[Edge]
) -> list[Target | None]:
    """One target per wanted edge; None if it does not lie behind the seeds."""
    layouts = follow(graph, wiring, seeds)
    users = _users(graph, wiring, layouts)

    def target(edge: Edge) -> Target | None:
        layout = layouts.get(edge)
        if layout is None:
            return None
        as_a_whole = Target(edge, layout.count) if isinstance(layout, Examples) else Target(edge, 1, mixed=layout)
        by_uses = _target_of_uses(edge, [*_uses(edge, (), graph, wiring, layouts, users)])
        return as_a_whole if as_a_whole.mixed is None and as_a_whole.count >= by_uses.count else by_uses

    return [target(edge) for edge in wanted]


def _target_of_uses(edge: Edge, uses: Sequence[Use | Mixed]) -> Target:
    found = tuple(use for use in uses if isinstance(use, Use))
    odd = next((use for use in uses if isinstance(use, Mixed)), None)
    count = min((use.split.count for use in found), default=1)
    if odd is None and any(use.split.count % count for use in found):
        odd = Mixed("groups of several sizes")
    if odd is not None:
        return Target(edge, 1, mixed=odd)
    return Target(edge, count, tuple(use.grouped(count) for use in found))


def _users(graph: Graph, wiring: Wiring, layouts: Mapping[Edge, Layout]) -> dict[Edge, list[tuple[Node, int]]]:
    """By edge, the nodes behind the seeds that read it, and as which of their inputs."""
    behind = {node for node, _ in layouts}
    users: dict[Edge, list[tuple[Node, int]]] = {}
    for place in wiring.order:
        node = graph.nodes[place]
        for index, link in enumerate(wiring.edges[place] if node in behind else ()):
            if link is not None:
                users.setdefault(graph.edge(link), []).append((node, index))
    return users


def _uses(
    edge: Edge,
    views: Views,
    graph: Graph,
    wiring: Wiring,
    layouts: Mapping[Edge, Layout],
    users: Mapping[Edge, Sequence[tuple[Node, int]]],
) -> Iterator[Use | Mixed]:
    """All uses of an edge, also behind views of it; in place of one that cannot be squared apart, why it cannot."""
    for node, index in users.get(edge, ()):
        place = graph.places[node]
        outputs = [nr for nr in range(len(wiring.shapes[place])) if (node, nr) in layouts]
        if node.name() in VIEWS:
            for nr in outputs:
                yield from _uses((node, nr), (*views, (node, nr)), graph, wiring, layouts, users)
            continue
        layout, shape = layouts[node, outputs[0]], wiring.wanted[place][index]
        assert shape is not None
        if isinstance(layout, Mixed):
            yield layout
        elif outputs != [0]:
            yield Mixed(node.name())
        else:
            yield use_at(node, index, views, shape, wiring.shapes[place][0], layout) or Mixed(node.name())


def pulled_squares(
    outputs: Sequence[Edge],
    vectors: Sequence[Tensor],
    targets: Sequence[Target | None],
    shapes: Sequence[torch.Size],
    *,
    batched: bool = False,
) -> list[Tensor | None]:
    """Σ_n (J_nᵀ v_n)² at each target: one vector-Jacobian product by torch's engine, then squares.

    ``batched``: the sum over several v, which have one dimension more, by one product for all of them.
    """
    edges = [edge for target in targets if target is not None for edge in target.edges]
    pulled = iter(nested_gradients(outputs, edges, vectors, batched=batched) if edges else ())
    found: list[Tensor | None] = []
    with torch.no_grad():
        for target, shape in zip(targets, shapes, strict=True):
            own = [next(pulled) for _ in target.edges] if target is not None else []
            if target is None or all(v is None for v in own):
                found.append(None)
            elif batched:
                found.append(torch.vmap(_without_missing(target, own, shape))([v for v in own if v is not None]).sum(0))
            else:
                found.append(target.squares(own, shape))
    return found


def _without_missing(
    target: Target, gradients: Sequence[Tensor | None], shape: torch.Size
) -> Callable[[Sequence[Tensor]], Tensor]:
    """``target.squares`` as a function of the gradients that are there, which is all that vmap can take."""

    def squares(given: Sequence[Tensor]) -> Tensor:
        rest = iter(given)
        found = target.squares([None if v is None else next(rest) for v in gradients], shape)
        assert found is not None
        return found

    return squares
