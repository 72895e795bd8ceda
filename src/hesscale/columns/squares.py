"""The gradient of every single example, at the node where a parameter is used: J_nᵀ v_n, some examples at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..rules.calculus import View, pull, widened
from ..rules.convolution import convolution_backward
from ..rules.families import signed
from .batch_layout import Examples

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

    def grouped(self, count: int) -> Split:
        """The same for groups of neighboring examples."""
        return replace(self, count=count, inside=self.inside * (self.count // count))


Views = tuple[tuple[Node, int], ...]
"""From a parameter on, each with the number of the output that was used."""

Gradients = Callable[[slice], Tensor]
"""Of the examples in a slice, [examples, *shape]."""


@dataclass(frozen=True)
class Formula:
    """How a node's gradient v becomes that of one of its inputs, of a given shape, example by example.

    ``shared(rank, shape)``: over how many of the first dimensions of the output all elements share the input.
    ``squares``, if not None, is a shorter way to Σ_n of the squared gradients.
    """

    gradients: Callable[[Any, Tensor, Split, torch.Size], Gradients]
    shared: Callable[[int, torch.Size], int]
    squares: Callable[[Any, Tensor, Split, torch.Size], Tensor | None] = lambda *_: None


@dataclass(frozen=True)
class Use:
    """One use of a parameter: by ``formula`` at ``node``, behind some ``views`` of it."""

    node: Any
    shape: torch.Size  # of the node's input
    views: Views
    formula: Formula
    split: Split

    def grouped(self, count: int) -> Use:
        """The same for groups of neighboring examples."""
        return replace(self, split=self.split.grouped(count))

    def gradients(self, v: Tensor) -> Gradients:
        """The parameter's gradients, v being the one at the node's output."""
        own = self.formula.gradients(View(self.node), widened(v), self.split, self.shape)

        def of_parameter(chunk: slice) -> Tensor:
            found = own(chunk)
            through = functools.partial(through_views, self.views)
            if any(view.name() == _CAST for view, _ in self.views):  # which is done in parts that depend on the data
                return torch.stack([*map(through, found)])
            return torch.vmap(through)(found) if self.views else found

        return of_parameter

    def squares(self, v: Tensor) -> Tensor:
        """Σ_n of the parameter's squared gradient of example n."""
        node, v = View(self.node), widened(v)
        found = self.formula.squares(node, v, self.split, self.shape)
        if found is None:
            found = summed_squares([self.formula.gradients(node, v, self.split, self.shape)], self.split, self.shape)
        return through_views(self.views, found).contiguous()


def through_views(views: Views, found: Tensor) -> Tensor:
    """Gradients of the last of some views of a parameter as those of the parameter; squares move as gradients do."""
    for view, nr in reversed(views):
        (moved,) = pull(view, *(found if i == nr else None for i in range(len(view._input_metadata))))
        assert moved is not None
        found = moved
    return found


def summed_squares(uses: Sequence[Gradients], split: Split, shape: torch.Size) -> Tensor:
    """Σ_n (Σ_uses J_nᵀ v_n)²: an example's gradients are added up over all uses before they are squared."""
    total: Tensor | None = None
    for chunk in _chunks(split.count, shape.numel()):
        gradient = uses[0](chunk)
        for use in uses[1:]:
            gradient = gradient + use(chunk)
        squares = gradient.square().sum(0)
        total = squares if total is None else total.add_(squares)
    assert total is not None
    return total


def _chunks(count: int, elements: int) -> Iterator[slice]:
    step = max(_ELEMENTS // max(elements, 1), 1)
    return (slice(start, start + step) for start in range(0, count, step))


def use_at(
    node: Any,
    index: int,
    views: tuple[tuple[Node, int], ...],
    shape: torch.Size,
    output: torch.Size,
    examples: Examples,
) -> Use | None:
    """The use of input ``index`` of a node, whose first output has these examples; None if there is no formula."""
    formula = _FORMULAS.get((node.name(), index))
    if formula is None:
        return None
    dims = formula.shared(len(output), shape)
    whole = examples.of_slices(output, dims)
    if whole is None:
        return None
    split = Split(dims, whole.count, whole.stride // math.prod(output[dims:]))
    return Use(node, shape, views, formula, split)


_CAST = "ToCopyBackward0"
VIEWS = {
    "AliasBackward0",
    "CloneBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "TBackward0",
    _CAST,
    "TransposeBackward0",
    "TransposeBackward1",
    "UnbindBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Every element of the input appears in the output once, or not at all: squares move back as gradients do."""


def _first(rank: int, shape: torch.Size) -> int:
    return 1


def _all_but_last(rank: int, shape: torch.Size) -> int:
    return rank - 1


def _matrix(v: Tensor, a: Tensor, split: Split, shape: torch.Size) -> Gradients:
    """B in y = AB:  A_nᵀ v_n."""
    a, v = split(a), split(v)
    return lambda chunk: (v[chunk].mT @ a[chunk]).mT  # transposed, as weights are kept


def _matrix_squares(v: Tensor, a: Tensor, split: Split, shape: torch.Size) -> Tensor | None:
    """(A²)ᵀ v² if every example has one row."""
    if split.count != v.shape[0]:
        return None
    v, squares = split(v)[:, 0], split(a)[:, 0].square()
    parts = v.split(max(_ELEMENTS // 8 // len(v), 1), 1) if len(v) else (v,)
    return torch.cat([part.square().mT @ squares for part in parts]).mT


def _mm(of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, v, split, shape: of(v, node._saved_self, split, shape)


def _addmm(of: Callable[..., Any]) -> Callable[..., Any]:
    def formula(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Any:
        return of(v * node._saved_alpha if node._saved_alpha != 1 else v, node._saved_mat1, split, shape)

    return formula


def _kernel(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Gradients:
    """The kernel of a convolution: examples stand side by side as groups of channels, so that each has its own."""
    x, v = split(node._saved_input), split(v)

    def gradients(chunk: slice) -> Tensor:
        apart, inputs = (t[chunk].transpose(0, 1).flatten(1, 2) for t in (v, x))  # [places, examples · channels, …]
        count = len(v[chunk])
        kernels = v.new_empty(()).expand(count * shape[0], *shape[1:])
        found = convolution_backward(node, apart, inputs, kernels, [False, True, False], copies=count)[1]
        assert found is not None
        return found.view(count, *shape)

    return gradients


def _looked_up(node: Any, v: Tensor, split: Split, count: int) -> tuple[Tensor, Tensor]:
    """What an embedding with so many rows was asked for, [N, places], and the gradients there, [N, places, d]."""
    rows, v = split(node._saved_indices), split(v)
    if node._saved_scale_grad_by_freq:
        each = rows.flatten()
        v = v / v.new_zeros(count).index_add_(0, each, v.new_ones(each.shape))[rows].unsqueeze(-1)
    return rows, v.where((rows != signed(node._saved_padding_idx)).unsqueeze(-1), 0.0)


def _rows(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Gradients:
    """The table of an embedding."""
    rows, v = _looked_up(node, v, split, shape[0])

    def gradients(chunk: slice) -> Tensor:
        own = torch.arange(len(rows[chunk]), device=rows.device).unsqueeze(1) * shape[0] + rows[chunk]
        table = v.new_zeros(len(own) * shape[0], shape[1])
        return table.index_add(0, own.flatten(), v[chunk].flatten(0, 1)).view(-1, *shape)

    return gradients


def _row_squares(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Tensor:
    """The same without tables: an example's gradients are added up wherever it looks at a row again.

    Pairs of example and row are sorted, and each takes the place of the first that is equal.
    """
    rows, v = _looked_up(node, v, split, shape[0])
    own = torch.arange(split.count, device=rows.device).unsqueeze(1) * shape[0] + rows
    pairs, order = own.flatten().sort(stable=True)
    place = torch.searchsorted(pairs, pairs)
    gradients = torch.zeros_like(v.flatten(0, 1)).index_add(0, place, v.flatten(0, 1)[order])
    return v.new_zeros(shape).index_add(0, pairs % shape[0], gradients.square())


def _broadcast(slope: Callable[[Any, Tensor], Any], *, channels: bool = False) -> Formula:
    """Of an input that is broadcast to the output: ``slope(node, v)``, summed over the places it was broadcast to.

    ``channels``: the input belongs to dimension 1 of the output, else to its last dimensions.
    """

    def aligned(rank: int, shape: torch.Size) -> list[int]:
        padded = [*shape, *[1] * (rank - 2)] if channels else [*shape]
        return [1] * (rank - len(padded)) + padded

    def shared(rank: int, shape: torch.Size) -> int:
        return next((dim for dim, size in enumerate(aligned(rank, shape)) if size != 1), rank)

    def gradients(node: Any, v: Tensor, split: Split, shape: torch.Size) -> Gradients:
        rest = aligned(v.dim(), shape)[split.dims :]
        over = [1, *(2 + dim for dim, size in enumerate(rest) if size == 1)]
        product: Tensor = slope(node, v)
        found = split(product).sum(over)
        return lambda chunk: found[chunk].reshape(-1, *shape)

    return Formula(gradients, shared)


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
    ("MmBackward0", 1): Formula(_mm(_matrix), _first, _mm(_matrix_squares)),
    ("AddmmBackward0", 2): Formula(_addmm(_matrix), _first, _addmm(_matrix_squares)),
    ("AddmmBackward0", 0): _broadcast(lambda node, v: v * node._saved_beta),
    ("ConvolutionBackward0", 1): Formula(_kernel, _first),
    ("ConvolutionBackward0", 2): _CHANNEL_BIAS,
    ("EmbeddingBackward0", 0): Formula(_rows, _all_but_last, _row_squares),
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
    ("SubBackward0", 1): _broadcast(lambda node, v: v * -node._saved_alpha),
    ("MulBackward0", 0): _broadcast(lambda node, v: v * node._saved_other),
    ("MulBackward0", 1): _broadcast(lambda node, v: v * node._saved_self),
    ("ExpandBackward0", 0): _ADDEND,
    ("PreluKernelBackward0", 1): _broadcast(lambda node, v: v * node._saved_self.clamp_max(0)),
}
"""By the name of a node and the number of its input."""
