"""Vector-Jacobian products node by node: what torch's engine would do, but no hook of anybody sees them.

A column is no gradient: hooks on activations must not take it for one, and ``retain_grad`` must not collect it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..graph import Edge, Graph, Link, call
from ..rules.convolution import convolution_backward
from ..wiring import Wiring

Gradients = Sequence[Tensor | None]


def pull(
    graph: Graph, wiring: Wiring, outputs: Sequence[Edge], vectors: Sequence[Tensor], wanted: Sequence[Edge]
) -> list[Tensor | None]:
    """Jᵀv at each wanted edge, v being one vector per output; None where nothing arrives. The graph is kept."""
    ends = {graph.link(edge) for edge in wanted}
    leading = _leading_to(ends, wiring)
    waiting: dict[Link, Tensor] = {}
    found: dict[Link, Tensor] = {}
    for edge, v in zip(outputs, vectors, strict=True):
        _add(waiting, graph.link(edge), v, wiring)
    for place in wiring.order:
        links = [(place, nr) for nr in range(len(wiring.shapes[place]))]
        grads = [waiting.pop(link, None) for link in links]
        if all(grad is None for grad in grads):
            continue
        found.update({link: grad for link, grad in zip(links, grads, strict=True) if link in ends and grad is not None})
        if place not in leading:
            continue
        needed = [link is not None and (link in ends or link[0] in leading) for link in wiring.edges[place]]
        moved = _inputs(graph.nodes[place], grads, needed)
        for link, grad, is_needed in zip(wiring.edges[place], moved, needed, strict=True):
            if link is not None and is_needed and grad is not None:
                _add(waiting, link, grad, wiring)
    # leaves are not part of the order if the graph was cut down to targets
    found.update({link: v for link, v in waiting.items() if link in ends})
    return [found.get(graph.link(edge)) for edge in wanted]


def _leading_to(ends: set[Link], wiring: Wiring) -> set[int]:
    """The places of nodes with a wanted edge behind them."""
    leading: set[int] = set()
    for place in reversed(wiring.order):
        if any(link is not None and (link in ends or link[0] in leading) for link in wiring.edges[place]):
            leading.add(place)
    return leading


def _add(waiting: dict[Link, Tensor], link: Link, grad: Tensor, wiring: Wiring) -> None:
    """As the engine does: summed over places a tensor was broadcast to, in the dtype it has, and over its consumers."""
    shape, dtype = wiring.shapes[link[0]][link[1]], wiring.dtypes[link[0]][link[1]]
    if grad.shape != shape:
        grad = grad.sum_to_size(shape)
    grad = grad if grad.dtype is dtype else grad.to(dtype)
    before = waiting.get(link)
    waiting[link] = grad if before is None else before + grad


def _inputs(node: Any, grads: Gradients, needed: Sequence[bool]) -> Gradients:
    """The gradients of a node's inputs, at least of the needed ones."""
    short = _INPUT_SIDE.get(node.name())
    if short is not None and not any(needed[index] for index in range(len(needed)) if index != short[0]):
        alone = short[1](node, grads[0])
        return [alone if index == short[0] else None for index in range(len(needed))]
    return call(node, grads)


def _convolution(node: Any, v: Tensor) -> Tensor:
    found = convolution_backward(node, v, node._saved_input, node._saved_weight, [True, False, False])[0]
    assert found is not None
    return found


def _addmm(node: Any, v: Tensor) -> Tensor:
    found: Tensor = v @ node._saved_mat2.mT
    return found if node._saved_alpha == 1 else found * node._saved_alpha


_INPUT_SIDE: Mapping[str, tuple[int, Callable[[Any, Any], Tensor]]] = {
    "AddmmBackward0": (1, _addmm),
    "MmBackward0": (0, lambda node, v: v @ node._saved_mat2.mT),
    "ConvolutionBackward0": (0, _convolution),
}
"""Products whose other side is a parameter's: a node that is called by hand computes both."""
