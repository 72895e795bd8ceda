"""Where the model ends and the loss begins: the cut that the Gauss-Newton matrix is split at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..columns.likelihoods import likelihoods_of
from ..graph import Edge, Graph, Link, edge_of, graph_of
from ..wiring import behind, wire


class Output(NamedTuple):
    """A tensor that a model returned, and where it was in the graph then."""

    tensor: Tensor
    edge: Edge


def noted(outputs: Any) -> list[Output]:
    """A model's output, or those in tuples, lists and mappings: to be noted before a loss function changes any."""
    tensors = [y for y in _in_containers(outputs) if y.requires_grad]
    if not tensors:
        raise TypeError(
            "this method needs the model's output to be a tensor that requires grad, or a tuple or mapping of them, "
            f"not {type(outputs).__name__}"
        )
    return [Output(y, edge_of(y)) for y in tensors]


def _in_containers(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif is_dataclass(outputs) and not isinstance(outputs, (type, Mapping)):
        yield from _in_containers([getattr(outputs, field.name) for field in fields(outputs)])
    elif isinstance(outputs, (tuple, list, Mapping)):
        for one in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _in_containers(one)


def predictions(loss: Tensor, outputs: Sequence[Output]) -> list[Edge]:
    """The cut: on each path from the loss to the parameters, the first output of the model.

    Outputs that the loss reaches through others only are no part of it; one that it reads itself is, even if another
    one was computed from it. Two kinds of output give way to what lies behind them, since the loss is linear in them:

    - the model's own loss, which is a scalar or computed from other outputs alone: to those, and to the predictions of
      likelihoods that lead to none of them;
    - the value of a likelihood, such as log-softmax: to its predictions. If it is only a part of the output, the
      other parts stay.
    """
    graph = graph_of(loss)
    ends = {graph.link(edge) for _, edge in outputs if edge[0] in graph.places}
    if any(edge[0] not in graph.places and edge_of(y) != edge for y, edge in outputs):
        raise ValueError("loss_fn changes a view among the model's outputs in place: let it work on a clone")
    if not ends:
        raise ValueError("the loss does not depend on any tensor among the model's outputs")
    paths = _paths(graph, ends)
    found: dict[Link, None] = {}
    stack, seen = [(graph.link(edge_of(loss)), False)], set()
    while stack:
        link, within = stack.pop()  # within the model's own loss, that is
        if (link, within) in seen:
            continue
        seen.add((link, within))
        is_end = link in ends and link not in paths.losses
        if is_end or (within and link[0] not in paths.to_outputs):
            found.update(dict.fromkeys(_replaced(link, paths, keep=is_end)))
        elif link[0] in paths.to_outputs:
            stack += [(below, within or link in ends) for below in paths.inputs[link[0]]]
    return [*map(graph.edge, found)]


@dataclass(frozen=True)
class _Paths:
    """What lies behind each place."""

    inputs: Sequence[Sequence[Link]]  # by place
    likelihoods: Mapping[int, Sequence[Link]]  # places of those the loss is linear in, and their predictions
    to_likelihoods: Set[int]  # these places, and those from which linear operations lead to one
    to_outputs: Set[int]  # places with an output behind
    losses: Set[Link]  # outputs that are the model's own loss


def _paths(graph: Graph, ends: Set[Link]) -> _Paths:
    wiring = wire(graph.rows)
    inputs = [[link for link in links if link is not None] for links in wiring.edges]
    terms = likelihoods_of(graph, wiring)
    likelihoods = {
        graph.places[node]: [*map(graph.link, term.edges)] for term in terms.likelihoods for node in term.nodes
    }
    bent = behind((link for place in terms.reached - terms.passed for link in inputs[place]), graph.rows)

    def leading(holds: Callable[[int, Set[int]], bool]) -> set[int]:
        found: set[int] = set()
        for place in reversed(wiring.order):
            if holds(place, found):
                found.add(place)
        return found

    to_outputs = leading(lambda place, found: any(link in ends or link[0] in found for link in inputs[place]))
    past_outputs = leading(  # to a leaf
        lambda place, found: not inputs[place] or any(link not in ends and link[0] in found for link in inputs[place])
    )
    return _Paths(
        inputs=inputs,
        likelihoods=likelihoods,
        to_likelihoods=leading(
            lambda place, found: (
                place in likelihoods or (place in terms.passed and any(link[0] in found for link in inputs[place]))
            )
        ),
        to_outputs=to_outputs,
        losses={
            (place, nr)
            for place, nr in ends
            if place in (terms.reached - bent) & to_outputs
            and (wiring.shapes[place][nr] == () or place not in past_outputs)
        },
    )


def _replaced(link: Link, paths: _Paths, *, keep: bool) -> Iterator[Link]:
    """Predictions of the likelihoods that linear operations lead to from a tensor, and all else on the way to them.

    If there are none, the tensor itself, or nothing unless it is to be kept.
    """
    stack = [link] if keep or link[0] in paths.to_likelihoods else []
    while stack:
        link = stack.pop()
        if link[0] in paths.likelihoods:
            yield from paths.likelihoods[link[0]]
        elif link[0] in paths.to_likelihoods:
            stack += paths.inputs[link[0]]
        else:
            yield link
