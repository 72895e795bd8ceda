"""Complex tensors, as in rotary embeddings. Their curvature is complex too: its two parts are those of their two parts.

Torch has gradients alike, so views and sums need nothing new. A name followed by " (complex)" is that of a node which
reads or makes a complex tensor (see errors.py): the rules of real numbers do not hold there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import COMPLEX
from .calculus import reduced
from .families import Bilinear, Coupled, Curvatures, Selection
from .table import register


def _named(*names: str) -> list[str]:
    return [name + COMPLEX for name in names]


def product(node: Any, s: Tensor, wanted: Sequence[torch.Size | None]) -> Curvatures:
    """y = xz, the real parts a and the imaginary parts b of z:  a²·Re s + b²·Im s  and  b²·Re s + a²·Im s."""
    factors = (node._saved_other, node._saved_self)
    return [
        None if shape is None else reduced(_through(s, factor, is_complex(edge)), shape)
        for edge, factor, shape in zip(node.next_functions, factors, wanted, strict=True)
    ]


def _through(s: Tensor, factor: Tensor, to_complex: bool) -> Tensor:
    a = factor.real.square()
    b = factor.imag.square() if factor.is_complex() else torch.zeros_like(a)
    real = a * s.real + b * s.imag
    return torch.complex(real, b * s.real + a * s.imag) if to_complex else real


def total(node: Any, s: Tensor, wanted: Sequence[torch.Size | None]) -> Curvatures:
    """x ± z: the curvature of a real term is that of the real part."""
    return [
        None if shape is None else reduced(s if is_complex(edge) else s.real, shape)
        for edge, shape in zip(node.next_functions, wanted, strict=True)
    ]


def is_complex(edge: tuple[Any, int]) -> bool:
    """Whether the tensor an edge stands for is complex."""
    child, nr = edge
    found: bool = child._input_metadata[nr].dtype.is_complex
    return found


def scaled_total(node: Any, s: Tensor, wanted: Sequence[torch.Size | None]) -> Curvatures:
    """x ± αz."""
    first, second = total(node, s, wanted)
    alpha = node._saved_alpha
    if isinstance(alpha, complex):
        raise NotImplementedError("x + alpha * z with a complex alpha has no rule: multiply z by it first.")
    return first, None if second is None else second * alpha**2


def unchanged(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """A part with its sign turned has the curvature it had."""
    return s


register(Bilinear(product, ()), *_named("MulBackward0"))
register(Bilinear(scaled_total, (), linear=((0, 1),)), *_named("AddBackward0", "SubBackward0"))
register(Coupled(unchanged, linear=True), *_named("ConjBackward0", "ConjPhysicalBackward0", "NegBackward0"))
register(
    Selection(),
    *_named("ComplexBackward0", "ViewAsComplexBackward0", "ViewAsRealBackward0"),
    *_named("CatBackward0", "CloneBackward0", "ExpandBackward0", "FlipBackward0", "GatherBackward0", "IndexBackward0"),
    *_named("IndexSelectBackward0", "PermuteBackward0", "RepeatBackward0", "ReshapeAliasBackward0", "RollBackward0"),
    *_named("SelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0", "SqueezeBackward0"),
    *_named("SqueezeBackward1", "StackBackward0", "SumBackward0", "SumBackward1", "TBackward0", "TransposeBackward0"),
    *_named("UnbindBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0"),
)
