"""Convolution and its transpose in any number of dimensions: torch's own backward with squared input and weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .families import Bilinear, Curvatures
from .table import register


def convolution_backward(
    node: Any, v: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool], *, biases: Any = None, copies: int = 1
) -> Curvatures:
    """Torch's own backward of the convolution that ``node`` stands for, with other operands, side by side in copies."""
    grads: Curvatures = torch.ops.aten.convolution_backward(
        v,
        x,
        weight,
        biases,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups * copies,
        wanted,
    )
    return grads


def convolution(node: Any, s: Tensor, wanted: Any, input2: Tensor | None, weight2: Tensor | None) -> Curvatures:
    """y = W * x + b:  s spread back by W²,  s correlated with x²,  s summed per channel."""
    # torch saves an operand only if the other one needs it; any tensor of the right shape will do in its place
    absent = s.new_empty(())
    return convolution_backward(
        node,
        s,
        absent.expand(wanted[0]) if input2 is None else input2,
        absent.expand(wanted[1]) if weight2 is None else weight2,
        [shape is not None for shape in wanted],
        biases=node._saved_bias_sym_sizes_opt,
    )


register(Bilinear(convolution, ("input", "weight"), ((0, 2), (1, 2))), "ConvolutionBackward0")
