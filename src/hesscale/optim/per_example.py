"""Σ_n (J_nᵀ v_n)²: squares of the gradients of single examples, at the one node where a parameter is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..graph import Edge, Graph, edge_of
from ..rules.calculus import View, pull, widened
from ..rules.families import signed
from ..wiring import Wiring
from .examples import follow

_ELEMENTS = 2**20
"""Gradients of single examples are made this many numbers at a time, which also suits a processor's cache."""


@dataclass(frozen=True)
class Split:
    """How the first ``dims`` dimensions of tensors hold ``count`` examples, each with ``inside`` places in a row."""

    dims: int
    count: int
    inside: int

    def __call__(self, tensor: Tensor) -> Tensor:
        """[examples, places, the other dimensions]."""
        parts = tensor.reshape(-1, self.count, self.inside, *tensor.shape[self.dims :])
        return parts.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class Formula:
    """``squares(node, v, split, shape)`` of an input of that shape, v being the gradient at the node's output.

    ``shared(rank, shape)``: over how many of the first dimensions of the output all elements share the input.
    """

    squares: Callable[[Any, Tensor, Split, torch.Size], Tensor]
    shared: Callable[[int, torch.Size], int]


@dataclass(frozen=True)
class Use:
    """The only use of a parameter: by ``formula`` at ``node``, behind some ``views`` of it."""

    node: Any
    shape: torch.Size  # of the node's input
    views: tuple[Node, ...]  # from the parameter on
    formula: Formula
    split: Split

    def squares(self, v: Tensor) -> Tensor:
        """Σ_n of the squared gradient of example n in the parameter, v being the gradient at the node's output."""
        found = self.formula.squares(View(self.node), widened(v), self.split, self.shape)
        for view in reversed(self.views):
            (moved,) = pull(view, found)
            assert moved is not None
            found = moved
        return found.contiguous()


def only_uses(graph: Graph, wiring: Wiring, seeds: Sequence[Edge], params: Sequence[Tensor]) -> list[Use | None]:
    """One per parameter: None if it is used more than once, in an op without formula, or where examples are mixed."""
    examples = follow(graph, wiring, seeds)
    behind = {node for node, _ in examples}
    users: dict[Edge, list[tuple[Node, int]]] = {}
    for place in wiring.order:
        node = graph.nodes[place]
        for index, link in enumerate(wiring.edges[place] if node in behind else ()):
            if link is not None:
                users.setdefault(graph.edge(link), []).append((node, index))

    def only_use(edge: Edge, views: tuple[Node, ...] = ()) -> Use | None:
        if edge in seeds or len(users.get(edge, ())) != 1:
            return None
        ((node, index),) = users[edge]
        if node.name() in _VIEWS:
            return only_use((node, 0), (*views, node))
        formula, own = _FORMULAS.get((node.name(), index)), examples.get((node, 0))
        place = graph.places[node]
        shape, output = wiring.wanted[place][index], wiring.shapes[place][0]
        if formula is None or own is None or shape is None:
            return None
        dims = formula.shared(len(output), shape)
        whole = own.of_slices(output, dims)
        if whole is None:
            return None
        split = Split(dims, whole.count, whole.stride // math.prod(output[dims:]))
        return Use(node, shape, views, formula, split)

    return [only_use(edge_of(p)) for p in params]


_VIEWS = {
    "AliasBackward0",
    "CloneBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Every element of the input appears in the output once, or not at all: squares move back as gradients do."""


def _first(rank: int, shape: torch.Size) -> int:
    return 1


def _all_but_last(rank: int, shape: torch.Size) -> int:
    return rank - 1


def _chunks(split: Split, shape: torch.Size) -> Iterator[slice]:
    step = max(_ELEMENTS // max(shape.numel(), 1), 1)
    return (slice(start, start + step) for start in range(0, split.count, step))


def _matrix(v: Tensor, a: Tensor, split: Split, shape: torch.Size) -> Tensor:
    """B in y = AB:  Σ_n (A_nᵀ v_n)²,  which is (A²)ᵀ v² if every example has one row."""
    a, v = split(a), split(v)
    if a.shape[1] == 1:
        return (v[:, 0].square().mT @ a[:, 0].square()).mT
    total = v.new_zeros(shape[1], shape[0])  # transposed, as weights are kept
    for chunk in _chunks(split, shape):
        total += (v[chunk].mT @ a[chunk]).square_().sum(0)
    return total.mT


def _mm(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Tensor:
    return _matrix(v, node._saved_self, split, shape)


def _addmm(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Tensor:
    return _matrix(v * node._saved_alpha if node._saved_alpha != 1 else v, node._saved_mat1, split, shape)


def _kernel(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Tensor:
    """The kernel of a convolution: examples stand side by side as groups of channels, so that each has its own."""
    x, v = split(node._saved_input), split(v)
    total = v.new_zeros(shape)
    for chunk in _chunks(split, shape):
        grouped = [t[chunk].transpose(0, 1).flatten(1, 2) for t in (v, x)]  # [places, examples · channels, …]
        count = len(v[chunk])
        gradients = torch.ops.aten.convolution_backward(
            *grouped,
            v.new_empty(()).expand(count * shape[0], *shape[1:]),
            None,
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups * count,
            [False, True, False],
        )[1]
        total += gradients.view(count, *shape).square_().sum(0)
    return total


def _rows(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Tensor:
    """The table of an embedding: an example's gradients are added up wherever it looks at a row again."""
    rows, v = split(node._saved_indices), split(v)  # [N, places], [N, places, d]
    kept = rows != signed(node._saved_padding_idx)
    if node._saved_scale_grad_by_freq:
        v = v / rows.flatten().bincount()[rows].unsqueeze(-1)
    own = torch.arange(split.count, device=rows.device).unsqueeze(1) * shape[0] + rows
    pairs, place = own[kept].unique(return_inverse=True)
    gradients = v.new_zeros(len(pairs), shape[1]).index_add_(0, place, v[kept])
    return v.new_zeros(shape).index_add_(0, pairs % shape[0], gradients.square())


def _broadcast(slope: Callable[[Any, Tensor], Any], *, channels: bool = False) -> Formula:
    """Of an input that is broadcast to the output: ``slope(node, v)``, summed over the places it was broadcast to.

    ``channels``: the input belongs to dimension 1 of the output, else to its last dimensions.
    """

    def aligned(rank: int, shape: torch.Size) -> list[int]:
        padded = [*shape, *[1] * (rank - 2)] if channels else [*shape]
        return [1] * (rank - len(padded)) + padded

    def shared(rank: int, shape: torch.Size) -> int:
        return next((dim for dim, size in enumerate(aligned(rank, shape)) if size != 1), rank)

    def squares(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Tensor:
        rest = aligned(v.dim(), shape)[split.dims :]
        over = [1, *(2 + dim for dim, size in enumerate(rest) if size == 1)]
        product: Tensor = slope(node, v)
        return split(product).sum(over).square().sum(0).reshape(shape)

    return Formula(squares, shared)


def _constant(node: Any, v: Tensor) -> Tensor:
    return v


def _normalized(node: Any, v: Tensor) -> Any:
    return v * ((node._saved_input - node._saved_result1) * node._saved_result2)


def _group_normalized(node: Any, v: Tensor) -> Any:
    x, mean, inverse = node._saved_input, node._saved_result1, node._saved_result2
    groups = x.reshape(*mean.shape, -1)
    return v * ((groups - mean.unsqueeze(-1)) * inverse.unsqueeze(-1)).view_as(x)


def _batch_normalized(node: Any, v: Tensor) -> Any:
    x = node._saved_input
    if node._saved_training:
        mean, inverse = node._saved_result1, node._saved_result2
    else:
        mean, inverse = node._saved_running_mean, (node._saved_running_var + node._saved_eps).rsqrt()
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return v * ((x - mean.view(shape)) * inverse.view(shape))


_ADDEND = _broadcast(_constant)
_CHANNEL_BIAS = _broadcast(_constant, channels=True)
_FORMULAS: dict[tuple[str, int], Formula] = {
    ("MmBackward0", 1): Formula(_mm, _first),
    ("AddmmBackward0", 2): Formula(_addmm, _first),
    ("AddmmBackward0", 0): _broadcast(lambda node, v: v * node._saved_beta),
    ("ConvolutionBackward0", 1): Formula(_kernel, _first),
    ("ConvolutionBackward0", 2): _CHANNEL_BIAS,
    ("EmbeddingBackward0", 0): Formula(_rows, _all_but_last),
    ("NativeLayerNormBackward0", 1): _broadcast(_normalized),
    ("NativeLayerNormBackward0", 2): _ADDEND,
    ("FusedRmsNormBackward0", 1): _broadcast(lambda node, v: v * (node._saved_input * node._saved_result1)),
    ("NativeGroupNormBackward0", 1): _broadcast(_group_normalized, channels=True),
    ("NativeGroupNormBackward0", 2): _CHANNEL_BIAS,
    ("NativeBatchNormBackward0", 1): _broadcast(_batch_normalized, channels=True),
    ("NativeBatchNormBackward0", 2): _CHANNEL_BIAS,
    ("AddBackward0", 0): _ADDEND,
    ("AddBackward0", 1): _broadcast(lambda node, v: v * node._saved_alpha),
    ("SubBackward0", 0): _ADDEND,
    ("SubBackward0", 1): _broadcast(lambda node, v: v * node._saved_alpha),  # its sign is squared away
    ("MulBackward0", 0): _broadcast(lambda node, v: v * node._saved_other),
    ("MulBackward0", 1): _broadcast(lambda node, v: v * node._saved_self),
    ("ExpandBackward0", 0): _ADDEND,
    ("PreluKernelBackward0", 1): _broadcast(lambda node, v: v * node._saved_self.clamp_max(0)),
}
"""By the name of a node and the number of its input."""
