"""One Hutchinson probe of the Hessian diagonal, and one draw of the Gauss-Newton diagonal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..graph import Edge, Graph, edge_of, trace
from ..rules import RULES
from ..rules.families import signed
from ..wiring import Wiring, behind, wire
from .per_example import only_uses


def hutchinson(
    loss: Tensor,
    params: Sequence[Tensor],
    *,
    spatial_average: bool = False,
    generator: torch.Generator | None = None,
    retain_graph: bool = False,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients, and v ∘ Hv for one v of random signs, by double backward; its expectation is the Hessian diagonal.

    ``spatial_average``: kernels of 2-d convolutions get the mean of |v ∘ Hv| over their two spatial dimensions, as in
    AdaHessian. None where the loss does not depend on p.
    """
    gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    pairs = [(p, g) for p, g in zip(params, gradients, strict=True) if g is not None]
    probes = [_signs(p, generator) for p, _ in pairs]
    products = _hessian_product(pairs, probes, retain_graph=retain_graph)
    found = iter([_averaged(v * hv, spatial_average) for v, hv in zip(probes, products, strict=True)])
    curvatures: list[Tensor | None] = [None if g is None else next(found) for g in gradients]
    return [None if g is None else g.detach() for g in gradients], curvatures


def _signs(p: Tensor, generator: torch.Generator | None) -> Tensor:
    bits = torch.randint(0, 2, p.shape, generator=generator, device=p.device)
    return bits.to(p.dtype).mul_(2).sub_(1)


def _hessian_product(
    pairs: Sequence[tuple[Tensor, Tensor]], probes: Sequence[Tensor], *, retain_graph: bool
) -> list[Tensor]:
    if not pairs:
        return []
    curved = [(g, v) for (_, g), v in zip(pairs, probes, strict=True) if g.requires_grad]
    if not curved:  # the loss is linear in all of them
        return [torch.zeros_like(v) for v in probes]
    products = torch.autograd.grad(
        [g for g, _ in curved],
        [p for p, _ in pairs],
        [v for _, v in curved],
        allow_unused=True,
        retain_graph=retain_graph,
    )
    return [torch.zeros_like(v) if hv is None else hv for hv, v in zip(products, probes, strict=True)]


def _averaged(curvature: Tensor, spatial_average: bool) -> Tensor:
    if spatial_average and curvature.dim() == 4:
        return curvature.abs().mean(dim=(2, 3), keepdim=True).expand_as(curvature).contiguous()
    return curvature


def sampled_gauss_newton(
    loss: Tensor,
    params: Sequence[Tensor],
    *,
    output: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor | None]:
    """Σ_n (J_nᵀv_n)² over the examples n, with one draw v_n each; on average the Gauss-Newton diagonal.

    v is a gradient of the loss at a target drawn from the model itself, with E[vvᵀ] = ∂²L/∂output²: drawn from the
    categorical distribution for log-softmax (cross-entropy), a Gaussian for the squared error, a Bernoulli for binary
    cross-entropy with logits. The loss may be linear in one of these, or in several; their first dimension is that of
    the examples. (For logits of shape [N·T, C] these are tokens, and sequences from where tokens of one are mixed.)

    Squares are taken example by example, as BackPACK's DiagGGNMC takes them, for weights and biases of linear layers,
    convolutions and normalization, embeddings, and parameters that are added or multiplied. All others get the square
    of the batch's gradient, (Σ_n J_nᵀv_n)², whose expectation is the same and whose variance is higher: parameters used
    more than once, those of recurrent layers, and all that lie behind an op that mixes examples (batch norm while it
    trains) or that examples.py does not know. ``output`` only makes sure that the loss was found where it begins.
    """
    graph = trace(edge_of(loss)[0])
    wiring = wire(graph.rows)
    found = [_draw(loss, node, generator) for node in _likelihoods(graph, wiring)]
    seeds = [edge for edge, _ in found]
    network = behind(map(graph.link, seeds), graph.rows)
    if output is not None and graph.places.get(edge_of(output)[0]) not in network:
        raise ValueError("output does not lie behind the likelihood that was found in this loss")
    uses = only_uses(graph, wiring, seeds, params)
    pulled = torch.autograd.grad(
        [GradientEdge(*edge) for edge in seeds],
        [GradientEdge(*(edge_of(p) if use is None else (use.node, 0))) for p, use in zip(params, uses, strict=True)],
        [v for _, v in found],
        retain_graph=True,
        allow_unused=True,
    )
    with torch.no_grad():
        return [
            None if u is None else u.square() if use is None else use.squares(u).to(p.dtype)
            for p, use, u in zip(params, uses, pulled, strict=True)
        ]


def _likelihoods(graph: Graph, wiring: Wiring) -> list[Node]:
    """The nodes of the loss that belong to a known likelihood; all nodes before them must be linear."""
    found: list[Node] = []
    reached = {0}
    for place in wiring.order:
        node = graph.nodes[place]
        if place not in reached:
            continue
        if node.name() in _DRAWS:
            found.append(node)
        elif node.name() in RULES and RULES[node.name()].is_linear(wiring.wanted[place]):
            reached.update(link[0] for link in wiring.edges[place] if link is not None)
        else:
            raise ValueError(
                f"no likelihood to draw from: the loss ends in {node.name()}, which is neither linear nor one of "
                f"{', '.join(_DRAWS)}"
            )
    return found


def _draw(loss: Tensor, node: Any, generator: torch.Generator | None) -> tuple[Edge, Tensor]:
    g = torch.autograd.grad(loss, GradientEdge(node, 0), retain_graph=True)[0]
    with torch.no_grad():
        v: Tensor = _DRAWS[node.name()](node, g, generator)
    return node.next_functions[0], v


def _categorical(node: Any, g: Tensor, generator: torch.Generator | None) -> Tensor:
    """√a (q − onehot(k)), k ~ q, with a = −Σ g over the classes: E[vvᵀ] = a (diag q − qqᵀ)."""
    dim = signed(node._saved_dim)
    result: Tensor = node._saved_result
    q = result.exp().movedim(dim, -1)
    drawn = torch.multinomial(q.reshape(-1, q.shape[-1]), 1, generator=generator).view(*q.shape[:-1], 1)
    weight = -g.movedim(dim, -1).sum(-1, keepdim=True)
    return ((q - torch.zeros_like(q).scatter_(-1, drawn, 1.0)) * _root(weight)).movedim(-1, dim)


def _gaussian(node: Any, g: Tensor, generator: torch.Generator | None) -> Tensor:
    """√(2a) ε, ε ~ N(0, I), for a (y − target)²: E[vvᵀ] = 2a I."""
    y = node._saved_self
    noise = torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype)
    return noise * _root(2 * _each(node, g, y))


def _bernoulli(node: Any, g: Tensor, generator: torch.Generator | None) -> Tensor:
    """√a (σ(y) − b), b ~ σ(y), with a the element's weight in the loss: E[vvᵀ] = a σ(1 − σ)."""
    y, target, weight, positive = node._saved_self, node._saved_target, node._saved_weight, node._saved_pos_weight
    factor = _each(node, g, y) * (1 if weight is None else weight)
    if positive is not None:
        factor = factor * (1 + (positive - 1) * target)
    q = torch.sigmoid(y)
    return (q - torch.bernoulli(q, generator=generator)) * _root(factor)


_DRAWS: dict[str, Callable[[Any, Tensor, torch.Generator | None], Tensor]] = {
    "LogSoftmaxBackward0": _categorical,
    "MseLossBackward0": _gaussian,
    "BinaryCrossEntropyWithLogitsBackward0": _bernoulli,
}


def _each(node: Any, g: Tensor, y: Tensor) -> Tensor:
    """The weight of each element in a loss that was averaged (reduction 1), summed or left as it is."""
    return g / y.numel() if node._saved_reduction == 1 else g


def _root(weight: Tensor) -> Tensor:
    if bool((weight < 0).any()):
        raise ValueError("the loss is a likelihood with a negative weight: its Gauss-Newton matrix has no root")
    return weight.sqrt()
