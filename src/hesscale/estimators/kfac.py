"""The diagonal of Kronecker-factored curvature, G ⊗ A layer by layer, with sampled targets as KFAC has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..columns.sampled import Draws
from ..graph import edge_of, graph_of, recompute
from ..recomputing import recomputed_once
from ..rules.calculus import added
from .batched_vjp import chunks, pulled_back
from .problem import Problem

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The layers that have Kronecker factors here."""

Calls = dict[nn.Module, list[tuple[Tensor, Tensor]]]
"""Input and output of every call of a layer."""


def kfac(problem: Problem) -> Sequence[Tensor | None]:
    """diag(G ⊗ A) for weights and diag G for biases (Martens & Grosse 2015; convolutions as in BackPACK).

    With r the sampled gradients at a layer's output and x its inputs: A = mean over examples of x xᵀ, G = Σ_n r rᵀ,
    averaged over samples. A convolution sums x xᵀ over positions, and r over positions before the product. A linear
    layer applied to several vectors per example takes each of them for an example.
    """
    owners = _owners(problem)
    with _recorded(set(owners.values())) as calls:
        outputs = problem.outputs()
    loss = problem.loss(outputs)
    _refuse_odd_calls(owners, calls)
    with recomputed_once():
        recompute(loss, problem.tensors)
        draws = Draws(loss)
        _refuse_shared(problem, loss, draws.penalties)
        layers = list(calls)
        gs = dict(zip(layers, _output_factors(problem, draws, layers, calls), strict=True))
    pairs = [(owner, name, problem.params[name]) for name, owner in owners.items()]
    return [
        added(_diagonal(owner, name, p, gs[owner], calls[owner][0][0]), draws.penalized(p)) for owner, name, p in pairs
    ]


def _owners(problem: Problem) -> dict[str, nn.Module]:
    """The layer each wanted parameter belongs to; an error names all that have no Kronecker factors."""
    owners, strangers = {}, []
    for name in problem.params:
        path, _, own = name.rpartition(".")
        owner = problem.model.get_submodule(path)
        owners[name] = owner
        if not isinstance(owner, LAYERS) or own not in ("weight", "bias"):  # weight_orig of a pruned one, say
            strangers.append(f"{name} ({type(owner).__name__})")
    if strangers:
        known = ", ".join(layer.__name__ for layer in LAYERS)
        raise NotImplementedError(
            f"'kfac' knows the parameters of {known}, not: {', '.join(strangers)}. Leave these out with params=[...]."
        )
    return owners


@contextmanager
def _recorded(layers: set[nn.Module]) -> Iterator[Calls]:
    calls: Calls = {layer: [] for layer in layers}

    def note(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        calls[layer].append((inputs[0].detach(), output))
        return output.clone()  # an activation in place must not turn the noted tensor into its own output

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _refuse_odd_calls(owners: Mapping[str, nn.Module], calls: Calls) -> None:
    odd = [f"{name} ({len(calls[owner])} calls)" for name, owner in owners.items() if len(calls[owner]) != 1]
    if odd:
        raise NotImplementedError(f"'kfac' needs layers that are called once in a forward pass, not: {', '.join(odd)}")


def _refuse_shared(problem: Problem, loss: Tensor, penalties: Container[Any]) -> None:
    graph = graph_of(loss)
    rows = [row for node, row in zip(graph.nodes, graph.rows, strict=True) if node not in penalties]
    readers = Counter(link[0] for row in rows for link in row[2] if link is not None)
    counts = {name: readers[graph.places.get(edge_of(p)[0], -1)] for name, p in problem.params.items()}
    shared = [f"{name} (read {count} times)" for name, count in counts.items() if count > 1]
    if shared:
        raise NotImplementedError(f"'kfac' needs parameters that one layer reads, once, not: {', '.join(shared)}")


def _output_factors(problem: Problem, draws: Draws, layers: Sequence[nn.Module], calls: Calls) -> Sequence[Tensor]:
    """diag G for each layer, [channels]."""
    ys = [calls[layer][0][1] for layer in layers]
    results = [y.new_zeros(()) for y in ys]
    for start, stop in chunks(problem.samples, elements=4 * sum(y.numel() for y in ys)):
        pulled = pulled_back(draws.edges, ys, draws(stop - start, problem.generator))
        results = [
            result + _squares(layer, rows) / problem.samples
            for layer, result, rows in zip(layers, results, pulled, strict=True)
        ]
    return results


def _squares(layer: nn.Module, rows: Tensor) -> Tensor:
    """Σ r² over samples and examples, [channels]; ``rows`` is [samples, *output]."""
    if not isinstance(layer, nn.Linear):
        rows = rows.flatten(-_spatial(layer)).sum(-1)
    return rows.flatten(0, -2).square().sum(0)


def _spatial(layer: nn.Module) -> int:
    return len(layer.kernel_size)  # type: ignore[arg-type]


def _diagonal(layer: nn.Module, name: str, p: Tensor, g: Tensor, x: Tensor) -> Tensor:
    if name.endswith("bias"):
        return g
    # the layer with its input squared and ones for gradients sums x² over all places where a weight meets it
    weight = torch.zeros_like(p, requires_grad=True)
    others = {key: torch.zeros_like(value) for key, value in layer.named_parameters(recurse=False)}
    output = functional_call(layer, {**others, "weight": weight}, (x.square(),))
    (a,) = torch.autograd.grad(output, weight, torch.ones_like(output))
    single = x.shape[:-1] if isinstance(layer, nn.Linear) else x.shape[: -_spatial(layer) - 1]
    return g.view(-1, *[1] * (p.dim() - 1)) * a / max(single.numel(), 1)  # an empty batch has no curvature
