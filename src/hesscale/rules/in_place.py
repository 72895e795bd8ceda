"""Writes into a tensor, or into a view of one (``x[:, 0] = y``, circular padding): the node hides which op it was."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .calculus import added, differentiate, inputs_of, pull, pull_weighted
from .families import Coupled, Curvatures
from .probing import separate_slopes
from .table import register

_NOT_ELEMENTWISE = (
    "An in-place operation on a view of a tensor is not element-wise, and torch does not say which one it was: "
    "write it out of place (y = y.op(...) instead of y[...].op_(...))."
)


def copy_slices(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """f'² s + f'' g for a base and what is written into it, f being any element-wise op: f' is the node's pull of ones,
    f'' the derivative of its pull of g."""
    seed = s if s is not None else g
    assert seed is not None
    slopes = separate_slopes(node, [seed])
    if slopes is None:
        raise NotImplementedError(_NOT_ELEMENTWISE)
    transports = slopes if s is None else pull(node, s)
    weighted = (None,) * len(slopes) if g is None else pull_weighted(node, g)
    results: list[Tensor | None] = []
    for edge, slope, moved, first in zip(node.next_functions, slopes, transports, weighted, strict=True):
        transport = None if s is None or slope is None or moved is None else slope * moved
        bend = None if edge[0] is None else differentiate(first, edge, fixed=inputs_of(node))
        results.append(added(transport, bend))
    return results


register(Coupled(copy_slices, linear=True), "torch::autograd::CopySlices")


def cast(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """A copy in another dtype or on another device, as it is: a cast to half precision would cost its digits."""
    ((child, nr),) = node.next_functions
    return (None if s is None else s.to(child._input_metadata[nr].device),)


def copy(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """What was there before a copy is gone; what was copied in, as ``cast``."""
    child, nr = node.next_functions[1]
    return None, None if s is None or child is None else s.to(child._input_metadata[nr].device)


register(Coupled(cast, linear=True, pointwise=True), "ToCopyBackward0")
register(Coupled(copy, linear=True), "torch::autograd::CopyBackwards")
