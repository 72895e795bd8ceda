"""Where the examples of a batch lie in every tensor of a graph. Ops keep them apart along the dimensions they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..graph import Edge, Graph, function_of
from ..rules import RULES
from ..rules.families import Rule, signed
from ..wiring import Wiring

Shape = Sequence[int]


@dataclass(frozen=True)
class Examples:
    """Element i of a tensor, in row-major order, belongs to example (i // stride) % count.

    In [N, T, d] examples have the stride T·d, in [T, N, d] the stride d, and reshaping a tensor changes nothing.
    """

    count: int
    stride: int

    def of_slices(self, shape: Shape, dims: int) -> Examples | None:
        """The same, or groups of them, such that each has whole slices x[i_1, …, i_dims]; None if there are none."""
        inside = math.prod(shape[dims:])
        if not inside or self.stride % inside == 0:
            return self if inside else None
        neighbors = self.count * self.stride == math.prod(shape)  # an example's elements lie in one piece
        return Examples(math.prod(shape[:dims]), inside) if neighbors and inside % self.stride == 0 else None

    def through(self, output: Shape, input: Shape, lead: int, trail: int) -> Examples | None:
        """Those of an input of an op that works apart along its first ``lead`` and its last ``trail`` dimensions."""
        last = output[len(output) - trail :]
        if math.prod(last) % (self.count * self.stride) == 0 and [*last] == [*input[len(input) - trail :]]:
            return self
        whole = self.of_slices(output, lead)
        if whole is None or not math.prod(input) or [*output[:lead]] != [*input[:lead]]:
            return None
        return Examples(whole.count, whole.stride // math.prod(output[lead:]) * math.prod(input[lead:]))

    def permuted(self, output: Shape, input: Shape, dims: Sequence[int]) -> Examples | None:
        """Those of an input whose dimension ``dims[d]`` became dimension d of the output."""
        for examples in (self, self.of_slices(output, 1)):
            for d, size in enumerate(output):
                after = math.prod(output[d + 1 :])
                if examples is None or not after or examples.stride % after:
                    continue
                inside = examples.stride // after
                if size % (examples.count * inside) == 0:  # all in this one dimension
                    return Examples(examples.count, inside * math.prod(input[dims[d] + 1 :]))
        return None


Behind = Callable[[Any, Examples, Shape, int, Shape], Examples | None]
"""(node, examples in an output, shape of it, number of an input, shape of it) → examples in the input."""


@dataclass(frozen=True)
class Mixed:
    """The examples cannot be told apart any more, or nobody knows how, since this operation."""

    by: str


Layout = Examples | Mixed


def along_first(shape: Shape) -> Layout:
    """The layout of a tensor whose first dimension is that of the examples."""
    size = math.prod(shape)
    first = shape[0] if len(shape) else 1
    return Examples(first, size // first) if size else Mixed("an empty tensor")


def follow(graph: Graph, wiring: Wiring, seeds: Mapping[Edge, Layout]) -> dict[Edge, Layout]:
    """The layout of all tensors behind the seeds, whose own is given."""
    found = dict(seeds)
    for place in wiring.order:
        node = graph.nodes[place]
        outputs = [(found[node, nr], shape) for nr, shape in enumerate(wiring.shapes[place]) if (node, nr) in found]
        for index, (link, input) in enumerate(zip(wiring.edges[place], wiring.wanted[place], strict=True)):
            if link is None or input is None:
                continue
            edge = graph.edge(link)
            for layout, output in outputs:
                own = _layout_behind(node, layout, output, index, input)
                found[edge] = _joined(found[edge], own, input.numel()) if edge in found else own
    return found


def _layout_behind(node: Any, layout: Layout, output: Shape, index: int, input: Shape) -> Layout:
    if isinstance(layout, Mixed):
        return layout
    return _behind(node, layout, output, index, input) or Mixed(node.name())


def _joined(first: Layout, second: Layout, size: int) -> Layout:
    """What two uses of a tensor have in common: the same examples, or the larger groups if those hold the smaller."""
    if isinstance(first, Mixed) or first == second:
        return first
    if isinstance(second, Mixed):
        return second
    few, many = sorted((first, second), key=lambda examples: examples.count)
    nested = few.count * few.stride == many.count * many.stride == size and few.stride % many.stride == 0
    return few if nested else Mixed("two orders of the batch")


def rule_of(node: Any) -> Rule | None:
    """The rule of a node, registered by its name or by the class of its Function."""
    return RULES.find(node.name(), function_of(type(node)))


def _behind(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
    name = node.name()
    if name in _KINDS:
        return _KINDS[name](node, examples, output, index, input)
    rule = rule_of(node)
    if rule is not None and rule.pointwise:
        return _pointwise(node, examples, output, index, input)
    return None


def _reshaped(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
    return examples


def _pointwise(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
    padded = [*[1] * (len(output) - len(input)), *input]
    same = [a == b for a, b in zip(output, padded, strict=True)]
    if all(same):
        return examples
    return examples.through(output, padded, same.index(False), same[::-1].index(False))


def _apart(*pairs: tuple[int, int] | None) -> Behind:
    """Of ops that work apart along the first and the last so many dimensions of each input; None: nothing is known."""

    def behind(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
        pair = pairs[index] if index < len(pairs) else None
        return None if pair is None else examples.through(output, input, *pair)

    return behind


def _along(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
    """Of ops along one dimension or several."""
    rank = max(len(output), len(input))
    saved = node._saved_dims if hasattr(node, "_saved_dims") else node._saved_dim
    given = saved if isinstance(saved, (tuple, list)) else () if saved is None else (saved,)  # None: along all of them
    dims = [signed(dim) % rank for dim in given] if rank else []
    return examples.through(output, input, min(dims), rank - 1 - max(dims)) if dims else None


def _inside(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
    """Of norms over the last dimensions."""
    lead = len(output) - len(node._saved_normalized_shape)
    return examples.through(output, input, lead, 0) if index == 0 else None


def _padded(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
    return examples.through(output, input, len(output) - len(node._saved_pad) // 2, 0)


def _batch_norm(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
    """With the statistics of the batch every example depends on every other."""
    return examples if index == 0 and not node._saved_training else None


def _recurrent(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
    """Of a fused layer over [time, examples, units], or its last state; weights, which all share, come second."""
    if 0 < index < 5 or examples != Examples(output[-2], output[-1]):
        return None
    return Examples(output[-2], input[-1])


def _permuted(node: Any, examples: Examples, output: Shape, index: int, input: Shape) -> Examples | None:
    rank = len(output)
    dims = [*range(rank)]
    if hasattr(node, "_saved_dims"):
        dims = [signed(dim) % rank for dim in node._saved_dims]
    elif hasattr(node, "_saved_dim0"):
        a, b = signed(node._saved_dim0) % rank, signed(node._saved_dim1) % rank
        dims[a], dims[b] = dims[b], dims[a]
    else:
        dims.reverse()  # t()
    return examples.permuted(output, input, dims)


_FIRST = (1, 0)
_KINDS: dict[str, Behind] = {
    **dict.fromkeys(
        (
            "ReshapeAliasBackward0",
            "SqueezeBackward0",
            "SqueezeBackward1",
            "SqueezeBackward2",
            "UnsafeViewBackward0",
            "UnsqueezeBackward0",
            "ViewBackward0",
        ),
        _reshaped,
    ),
    **dict.fromkeys(("PermuteBackward0", "TBackward0", "TransposeBackward0", "TransposeBackward1"), _permuted),
    **dict.fromkeys(("ExpandBackward0", "MaskedFillBackward0"), _pointwise),
    **dict.fromkeys(
        (
            "AmaxBackward0",
            "AminBackward0",
            "CatBackward0",
            "CumsumBackward0",
            "FlipBackward0",
            "GatherBackward0",
            "GluBackward0",
            "IndexSelectBackward0",
            "LinalgVectorNormBackward0",
            "LogSoftmaxBackward0",
            "LogsumexpBackward0",
            "MaxBackward0",
            "MeanBackward1",
            "MinBackward0",
            "ProdBackward1",
            "RollBackward0",
            "SelectBackward0",
            "SliceBackward0",
            "SoftmaxBackward0",
            "SplitBackward0",
            "SplitWithSizesBackward0",
            "StackBackward0",
            "StdBackward0",
            "SumBackward1",
            "UnbindBackward0",
            "UnsafeSplitBackward0",
            "UnsafeSplitWithSizesBackward0",
            "VarBackward0",
        ),
        _along,
    ),
    **dict.fromkeys(
        (
            "AdaptiveAvgPool2DBackward0",
            "AdaptiveAvgPool3DBackward0",
            "AdaptiveMaxPool2DBackward0",
            "AvgPool2DBackward0",
            "AvgPool3DBackward0",
            "ConvolutionBackward0",
            "MaxPool2DWithIndicesBackward0",
            "MaxPool3DWithIndicesBackward0",
            "NativeGroupNormBackward0",
            "UpsampleBilinear2DBackward0",
            "UpsampleNearest2DBackward0",
        ),
        _apart(_FIRST),
    ),
    **dict.fromkeys(("FusedRmsNormBackward0", "NativeLayerNormBackward0"), _inside),
    "ConstantPadNdBackward0": _padded,
    "NativeBatchNormBackward0": _batch_norm,
    "MkldnnRnnLayerBackward0": _recurrent,
    "MmBackward0": _apart(_FIRST, (0, 1)),
    "AddmmBackward0": _apart(None, _FIRST, (0, 1)),
    "BmmBackward0": _apart(_FIRST, (1, 1)),
    "BaddbmmBackward0": _apart(None, _FIRST, (1, 1)),
    **dict.fromkeys(
        (
            "ScaledDotProductEfficientAttentionBackward0",
            "ScaledDotProductFlashAttentionBackward0",
            "ScaledDotProductFlashAttentionForCpuBackward0",
        ),
        _apart(_FIRST, _FIRST, _FIRST),
    ),
}
