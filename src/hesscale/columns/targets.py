"""Where columns end: Σ_n (J_nᵀ u_n)² at one parameter or tensor, each example's gradient squared on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..graph import Edge, Graph, nested_gradients
from ..rules.calculus import View, widened
from ..rules.recurrent import Recurrent, is_batch_first
from ..wiring import Wiring
from .batch_layout import Examples, Layout, Mixed, along_first, follow, rule_of
from .pulling import pull
from .squares import VIEWS, Use, Views, summed_squares, through_views, use_at


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
    inside: Inside | None = None  # the only use, by a fused kernel

    @property
    def edges(self) -> list[Edge]:
        """Where gradients are needed."""
        if self.inside is not None:
            return self.inside.kernel.edges
        return [(use.node, 0) for use in self.uses] or [self.edge]

    def squares(self, gradients: Sequence[Tensor | None], shape: torch.Size) -> Tensor | None:
        """Σ_n of squares, from the gradients at ``edges``; None if none of them was reached."""
        if self.inside is not None:
            return self.inside.squares(gradients)
        if not self.uses:
            v = gradients[0]
            return None if v is None else widened(v.to_dense() if v.is_sparse else v).square()
        reached = [(use, v) for use, v in zip(self.uses, gradients, strict=True) if v is not None]
        if len(reached) < 2:
            return reached[0][0].squares(reached[0][1]) if reached else None
        return summed_squares([use.gradients(v) for use, v in reached], reached[0][0].split, shape).contiguous()


@final
class Kernel:
    """A fused recurrent kernel, as far as columns go through it."""

    def __init__(self, node: Any, rule: Recurrent, outputs: Sequence[int], inputs: Sequence[torch.Size | None]) -> None:
        self.edges: list[Edge] = [(node, nr) for nr in outputs]
        self._node, self._rule, self._inputs = node, rule, inputs
        self._last: tuple[Sequence[Tensor | None], Sequence[Tensor | None]] = ((), [])

    def squares(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Σ_n of squares at each input of the node; all inputs at once, kept for whoever asks next."""
        before = self._last[0]
        if len(before) != len(gradients) or any(a is not b for a, b in zip(before, gradients, strict=True)):
            every: list[Tensor | None] = [None] * len(self._node._input_metadata)
            for (_, nr), v in zip(self.edges, gradients, strict=True):
                every[nr] = widened(v)
            self._last = (gradients, self._rule.squares(View(self._node), every, self._inputs))
        return self._last[1]


@dataclass(frozen=True)
class Inside:
    """The use of a parameter by a fused kernel, as its input ``index``."""

    kernel: Kernel
    index: int
    views: Views
    count: int  # examples

    def squares(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Σ_n of the parameter's squared gradient of example n."""
        found = self.kernel.squares(gradients)[self.index]
        return None if found is None else through_views(self.views, found).contiguous()


def find_targets(
    graph: Graph, wiring: Wiring, seeds: Mapping[Edge, Layout], wanted: Sequence[Edge]
) -> list[Target | None]:
    """One target per wanted edge; None if it does not lie behind the seeds."""
    layouts = follow(graph, wiring, seeds)
    find_uses = _Uses(graph, wiring, layouts)

    def target(edge: Edge) -> Target | None:
        layout = layouts.get(edge)
        if layout is None:
            return None
        as_a_whole = Target(edge, layout.count) if isinstance(layout, Examples) else Target(edge, 1, mixed=layout)
        by_uses = _target_of_uses(edge, [*find_uses(edge)])
        return as_a_whole if as_a_whole.mixed is None and as_a_whole.count >= by_uses.count else by_uses

    return [target(edge) for edge in wanted]


def _target_of_uses(edge: Edge, uses: Sequence[Use | Inside | Mixed]) -> Target:
    if len(uses) == 1 and isinstance(uses[0], Inside):
        return Target(edge, uses[0].count, inside=uses[0])
    uses = [Mixed("a fused kernel and elsewhere") if isinstance(use, Inside) else use for use in uses]
    found = tuple(use for use in uses if isinstance(use, Use))
    odd = next((use for use in uses if isinstance(use, Mixed)), None)
    count = min((use.split.count for use in found), default=1)
    if odd is None and any(use.split.count % count for use in found):
        odd = Mixed("groups of several sizes")
    if odd is not None:
        return Target(edge, 1, mixed=odd)
    return Target(edge, count, tuple(use.grouped(count) for use in found))


@final
class _Uses:
    """Where tensors of a graph are used behind the seeds."""

    def __init__(self, graph: Graph, wiring: Wiring, layouts: Mapping[Edge, Layout]) -> None:
        self._graph, self._wiring, self._layouts = graph, wiring, layouts
        self._kernels: dict[Node, Kernel] = {}
        self._users: dict[Edge, list[tuple[Node, int]]] = {}  # by edge, who reads it, and as which input
        behind = {node for node, _ in layouts}
        for place in wiring.order:
            node = graph.nodes[place]
            for index, link in enumerate(wiring.edges[place] if node in behind else ()):
                if link is not None:
                    self._users.setdefault(graph.edge(link), []).append((node, index))

    def __call__(self, edge: Edge, views: Views = ()) -> Iterator[Use | Inside | Mixed]:
        """All uses of an edge, also behind views of it; in place of one that cannot be squared apart, why it cannot."""
        for node, index in self._users.get(edge, ()):
            outputs = self._outputs(node)
            if node.name() in VIEWS:
                for nr in outputs:
                    yield from self((node, nr), (*views, (node, nr)))
            else:
                yield self._use(node, index, outputs, views)

    def _outputs(self, node: Node) -> list[int]:
        shapes = self._wiring.shapes[self._graph.places[node]]
        return [nr for nr in range(len(shapes)) if (node, nr) in self._layouts]

    def _use(self, node: Node, index: int, outputs: Sequence[int], views: Views) -> Use | Inside | Mixed:
        place = self._graph.places[node]
        layout, shape = self._layouts[node, outputs[0]], self._wiring.wanted[place][index]
        assert shape is not None
        if any(self._layouts[node, nr] != layout for nr in outputs):
            return Mixed(node.name())
        if isinstance(layout, Mixed):
            return layout
        rule = rule_of(node)
        if isinstance(rule, Recurrent) and layout == _of_sequences(node, self._wiring.shapes[place][outputs[0]]):
            if node not in self._kernels:
                self._kernels[node] = Kernel(node, rule, outputs, self._wiring.wanted[place])
            return Inside(self._kernels[node], index, views, layout.count)
        found = use_at(node, index, views, shape, self._wiring.shapes[place][0], layout) if [*outputs] == [0] else None
        return found or Mixed(node.name())


def _of_sequences(node: Node, shape: torch.Size) -> Layout:
    """How an output of a recurrent kernel has to hold the examples, for its steps to keep them apart."""
    return along_first(shape) if is_batch_first(node) else Examples(shape[-2], shape[-1])


def pulled_squares(
    graph: Graph,
    wiring: Wiring,
    outputs: Sequence[Edge],
    vectors: Sequence[Tensor],
    targets: Sequence[Target | None],
    shapes: Sequence[torch.Size],
    *,
    batched: bool = False,
) -> list[Tensor | None]:
    """Σ_n (J_nᵀ v_n)² at each target: one vector-Jacobian product, then squares.

    ``batched``: the sum over several v, which have one dimension more, by one product for all of them.
    """
    edges = [edge for target in targets if target is not None for edge in target.edges]
    found: list[Tensor | None] = []
    with torch.no_grad():
        if batched and edges:
            pulled = iter(nested_gradients(outputs, edges, vectors, batched=batched))
        else:
            pulled = iter(pull(graph, wiring, outputs, vectors, edges))
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
