"""GGN-MC: the Gauss-Newton diagonal from targets drawn from the model itself, squared example by example."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..graph import Edge, Graph, edge_of, graph_of, nested_gradients, recompute, refuse_hidden
from ..recomputing import recomputed_once
from ..rules.calculus import View, added, widened
from ..wiring import Wiring, behind, wire
from .batch_layout import Examples, Layout, rule_of
from .likelihoods import known_likelihoods, likelihoods_of
from .targets import Target, find_targets, pulled_squares


@recomputed_once()
def sampled_gauss_newton(
    loss: Tensor,
    params: Sequence[Tensor],
    *,
    output: Tensor | None = None,
    generator: torch.Generator | None = None,
    samples: int = 1,
    at_once: int = 1,
    apart: bool = False,
) -> list[Tensor | None]:
    """Σ_n (J_nᵀv_n)² over the examples n, with one draw v_n each: on average the Gauss-Newton diagonal.

    None where nothing arrives. v is a gradient of the loss at a target drawn from the model itself, with
    E[vvᵀ] = ∂²L/∂output²: from the categorical distribution for log-softmax (cross-entropy), a normal for the squared
    error, a coin for binary cross-entropy with logits. The loss may be linear in one of these, or in several, and in
    penalties that are one function of a parameter itself, whose own diagonal is added; the first dimension is that of
    the examples. (For logits of shape [N·T, C] these are tokens, and sequences from where tokens
    of one are mixed.)

    Squares are taken example by example, as BackPACK's DiagGGNMC takes them, for parameters of linear layers,
    convolutions, normalization, embeddings, and those that are added or multiplied, used once or often. All others get
    the square of the batch's gradient, (Σ_n J_nᵀv_n)², whose expectation is the same and whose variance is higher:
    those behind an op that mixes examples (batch norm while it trains) or that nobody knows. ``apart`` keeps these
    apart, too, by as many passes as there are examples.

    The mean over ``samples`` is taken, ``at_once`` of which memory has room for. ``output`` only makes sure that the
    loss was found where it begins.
    """
    graph = graph_of(loss)
    refuse_hidden(graph.rows)
    if at_once > 1:
        recompute(loss, params)
    wiring = wire(graph.rows)
    draws = Draws(loss, graph, wiring)
    edges = draws.edges
    if output is not None and graph.places.get(edge_of(output)[0]) not in behind(map(graph.link, edges), graph.rows):
        raise ValueError("output does not lie behind the likelihood that was found in this loss")
    layouts = {edge: term.layout for term in draws.terms for edge in term.edges}
    targets = find_targets(graph, wiring, layouts, [edge_of(p) for p in params])
    fewest = min((target.count for target in targets if target is not None), default=1) if apart else None
    found: list[Tensor | None] = [None] * len(params)
    for start in range(0, samples, at_once):
        drawn = draws(min(at_once, samples - start), generator)
        for vectors in _parts(drawn, [layouts[edge] for edge in edges], fewest):
            squares = _squares(graph, wiring, edges, vectors, targets, [p.shape for p in params])
            found = [*map(added, found, squares)]
    means = [None if s is None else s.div_(samples) if samples > 1 else s for s in found]
    return [added(mean, draws.penalized(p)) for mean, p in zip(means, params, strict=True)]


def _squares(
    graph: Graph,
    wiring: Wiring,
    edges: Sequence[Edge],
    vectors: list[Tensor],
    targets: Sequence[Target | None],
    shapes: Sequence[torch.Size],
) -> list[Tensor | None]:
    """The sum over all of the vectors, [samples, *shape] each, at once if torch can."""
    samples = [[*v] for v in zip(*vectors, strict=True)]
    if len(samples) > 1:
        try:
            return pulled_squares(graph, wiring, edges, vectors, targets, shapes, batched=True)
        except RuntimeError:
            pass  # some backward formulas cannot be vmapped (group norm's in torch 2.13); a real error comes again
    found = [pulled_squares(graph, wiring, edges, sample, targets, shapes) for sample in samples]
    return [functools.reduce(added, each) for each in zip(*found, strict=True)]


def _parts(vectors: list[Tensor], layouts: Sequence[Layout], fewest: int | None) -> Iterator[list[Tensor]]:
    """The vectors in parts that never have two examples of one of the ``fewest`` groups; in one part if None."""
    counts = {layout.count for layout in layouts if isinstance(layout, Examples)}
    if fewest is None or len(counts) != 1:
        yield vectors
        return
    size = counts.pop() // fewest
    for place in range(size):
        yield [_masked(v, layout, size, place) for v, layout in zip(vectors, layouts, strict=True)]


def _masked(v: Tensor, layout: Layout, size: int, place: int) -> Tensor:
    """v for the examples at one place of each group of ``size``, zero for all others."""
    assert isinstance(layout, Examples)
    elements = torch.arange(v[0].numel(), device=v.device).view(v.shape[1:])
    return v.where(elements // layout.stride % layout.count % size == place, 0.0)


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-3))  # half precision is coarse


@final
class Draws:
    """The likelihoods of a loss, to be drawn from, and penalties on parameters; an error says what is in the way."""

    def __init__(self, loss: Tensor, graph: Graph | None = None, wiring: Wiring | None = None) -> None:
        graph = graph_of(loss) if graph is None else graph
        self.terms, penalties, stranger, *_ = likelihoods_of(graph, wire(graph.rows) if wiring is None else wiring)
        if stranger is not None or not self.terms:
            ending = "is linear, without" if stranger is None else f"ends in {stranger}, which is neither linear nor"
            raise ValueError(
                f"no likelihood to draw from: the loss {ending} one of {known_likelihoods()}. A penalty beside one has "
                "to be a function of a parameter itself, such as p.square().sum()"
            )
        nodes = [*penalties, *(node for term in self.terms for node in term.nodes)]
        found = nested_gradients([edge_of(loss)], [(node, 0) for node in nodes], [torch.ones_like(loss)])
        slopes = dict(zip(nodes, found, strict=True))
        if not all(_alike(slopes[term.node], slopes[node]) for term in self.terms for node in term.nodes):
            raise ValueError("no likelihood to draw from: log v and d²/v of a normal do not weigh the same in the loss")
        self._slopes = [slopes[term.node] for term in self.terms]
        self.penalties: dict[Any, Tensor | None] = {node: slopes[node] for node in penalties}

    @property
    def edges(self) -> list[Edge]:
        """The predictions."""
        return [edge for term in self.terms for edge in term.edges]

    def penalized(self, p: Tensor) -> Tensor | None:
        """The diagonal of all penalties on a parameter, which need no drawing."""
        total: Tensor | None = None
        own = edge_of(p)
        for node, g in self.penalties.items():
            wanted = [p.shape if edge == own else None for edge in node.next_functions]
            rule = rule_of(node)
            if g is not None and rule is not None and own in node.next_functions:
                found = rule(View(node), [None], [widened(g)], wanted)
                total = added(total, found[node.next_functions.index(own)])
        return total

    def __call__(self, count: int, generator: torch.Generator | None) -> list[Tensor]:
        """``count`` vectors v for each of the edges, [count, *shape], with E[vvᵀ] = ∂²L/∂output²."""
        with torch.no_grad():
            pairs = zip(self.terms, self._slopes, strict=True)
            return [v for term, g in pairs if g is not None for v in term.draws(g, count, generator)]
