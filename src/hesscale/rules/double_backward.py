"""What torch records when gradients are differentiated, as a gradient penalty does: y = u·f'(x) for a gradient u.

Such a y is linear in u. In x its derivatives are u·f'' and u·f''', which torch works out from f' as written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .calculus import added, pull
from .families import Coupled, Curvatures, Elementwise, Pair, Selection, signed
from .table import register

Pairs = tuple[Pair, ...]


def of_slope(slope: Callable[[Any, Tensor], Tensor], saved: str = "self") -> Elementwise:
    """The rule of u·f'(x), given f' as a function of the node and of what it saved."""

    def derivatives(node: Any) -> Pairs:
        with torch.enable_grad():
            x = getattr(node, f"_saved_{saved}").detach().requires_grad_()
            first = slope(node, x)
            second = _differentiated(first, x, keep=True)
            third = _differentiated(second, x)
        u = getattr(node, "_saved_grad_output", None)  # not there where f'' is zero
        bends = [None if t is None or u is None else u * t.detach() for t in (second, third)]
        return (first.detach(), None), (bends[0], bends[1])

    return Elementwise(derivatives, linear=((0,),))


def _differentiated(y: Tensor | None, x: Tensor, *, keep: bool = False) -> Tensor | None:
    if y is None or not y.requires_grad:
        return None
    (found,) = torch.autograd.grad(y.sum(), x, create_graph=keep, allow_unused=True)
    return found


def _gelu(node: Any, x: Tensor) -> Tensor:
    if node._saved_approximate == "tanh":
        k, c = 2 * math.sqrt(2 / math.pi), 0.044715
        sigma = torch.sigmoid(k * x * (1 + c * x * x))
        return sigma + x * sigma * (1 - sigma) * k * (1 + 3 * c * x * x)
    normal: Tensor = torch.special.ndtr(x)
    return normal + x * (x * x * -0.5).exp() / math.sqrt(2 * math.pi)


def _softplus(node: Any, x: Tensor) -> Tensor:
    scaled = node._saved_beta * x
    return torch.sigmoid(scaled).masked_fill(scaled > node._saved_threshold, 1.0)


def _elu(node: Any, x: Tensor) -> Tensor:
    scale, rate = node._saved_scale, node._saved_input_scale
    height = node._saved_alpha * scale
    left = rate * (x + height) if node._saved_is_result else rate * height * (rate * x.clamp_max(0)).exp()
    return torch.where(x <= 0, left, scale)


def _hardswish(node: Any, x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, x / 3 + 0.5, (x >= 3).to(x.dtype))


register(of_slope(lambda node, y: 1 - y * y, "output"), "TanhBackwardBackward0")
register(of_slope(lambda node, y: y * (1 - y), "output"), "SigmoidBackwardBackward0")
register(of_slope(_gelu), "GeluBackwardBackward0")
register(of_slope(_softplus), "SoftplusBackwardBackward0")
register(of_slope(_elu, "self_or_result"), "EluBackwardBackward0")
register(of_slope(lambda node, x: torch.sigmoid(-x)), "LogSigmoidBackwardBackward0")
register(of_slope(_hardswish), "HardswishBackwardBackward0")
register(
    of_slope(lambda node, x: torch.ones_like(x).masked_fill(x <= 0, node._saved_negative_slope)),
    "LeakyReluBackwardBackward0",
)
# a mask of u; flat in x
register(
    Selection(pointwise=True),
    "HardshrinkBackwardBackward0",
    "HardtanhBackwardBackward0",
    "SoftshrinkBackwardBackward0",
    "ThresholdBackwardBackward0",
)
# u moved to where its element came from
register(
    Selection(),
    "AdaptiveMaxPool2DBackwardBackward0",
    "AdaptiveMaxPool3DBackwardBackward0",
    "EmbeddingDenseBackwardBackward0",
    "MaxPool3DWithIndicesBackwardBackward0",
    "UpsampleNearest1DBackwardBackward0",
    "UpsampleNearest2DBackwardBackward0",
    "UpsampleNearest3DBackwardBackward0",
)


def squared(node: Any) -> Pairs:
    """2cu(x − t), c being 1/n for a mean: linear in each."""
    x, t, u = node._saved_self, node._saved_target, node._saved_grad_output
    c = 2 / max(x.numel(), 1) if node._saved_reduction == 1 else 2.0
    return (c * (x - t), None), (c * u, None), (c * u, None)


def log_softmax(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """u − q Σu, q = e^y:  s − 2qs + Σq²s for u,  and  (qΣu)² s − qΣu g for y."""
    dim, y = signed(node._saved_dim), node._saved_output
    q = y.exp()
    flow = q * node._saved_grad_output.sum(dim, keepdim=True)
    if s is None:
        return None, None if g is None else -flow * g
    own = s - 2 * q * s + (q.square() * s).sum(dim, keepdim=True)
    return own, added(flow.square() * s, None if g is None else -flow * g)


def softmax(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """q(u − m), m = Σqu:  q²(s − 2qs + Σq²s) for u,  and  (u − m)(u − m − 2qu)s + u²Σq²s − 2ug for q."""
    dim, q, u = signed(node._saved_dim), node._saved_output, node._saved_grad_output
    residual = None if g is None else -2 * u * g
    if s is None:
        return None, residual
    gap, total = u - (q * u).sum(dim, keepdim=True), (q.square() * s).sum(dim, keepdim=True)
    own = gap * (gap - 2 * q * u) * s + u.square() * total
    return q.square() * (s - 2 * q * s + total), added(own, residual)


def nll(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """−w u at the target class, w its weight, over the sum of weights for a mean:  Σw²s for u; flat in x."""
    if s is None:
        return None, None
    target = node._saved_target
    weight = (target != signed(node._saved_ignore_index)).to(s.dtype)
    if node._saved_weight is not None:
        weight = weight * node._saved_weight[target.clamp_min(0).clamp_max(len(node._saved_weight) - 1)]
    if node._saved_reduction == 1:
        weight = weight / weight.sum()
    return pull(node, -s * (weight.unsqueeze(1) if target.dim() else weight))[0], None


def average(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """u/n for all n elements of a window:  Σs/n² = (mean of s over the window) / n."""
    if s is None:
        return None, None
    ones = torch.ones_like(s[:1])
    window = (node._saved_kernel_size, node._saved_stride, node._saved_padding, node._saved_ceil_mode)
    pool = torch.nn.functional.avg_pool3d if "3D" in node.name() else torch.nn.functional.avg_pool2d
    divisor = node._saved_divisor_override
    share = pool(ones, *window, node._saved_count_include_pad, None if divisor is None else signed(divisor))
    elements = pool(ones, *window, node._saved_count_include_pad, 1)
    moved = pull(node, s)[0]
    return None if moved is None else moved * (share / elements), None


def adaptive_average(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """The same where windows differ in size: 1/n is what ones, pulled from one element of each window, would give."""
    if s is None:
        return None, None
    moved = pull(node, s)[0]
    if moved is None:
        return None, None
    for dim in range(-3 if "3D" in node.name() else -2, 0):
        length, windows = s.shape[dim], moved.shape[dim]
        places = torch.arange(windows, device=s.device)
        sizes = -(-(places + 1) * length // windows) - places * length // windows
        moved = moved / sizes.to(s).reshape(-1, *[1] * (-dim - 1))
    return moved, None


def convolution(node: Any, s: Curvatures, g: Curvatures) -> Curvatures:
    """The gradients of input, weight and bias, each a product of two: torch's own double backward of squares."""
    if all(entry is None for entry in s):
        return None, None, None
    u, x, w = (t.square() for t in (node._saved_grad_output, node._saved_input, node._saved_weight))
    how = (node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed)
    found = torch.ops.aten._convolution_double_backward(
        *s, u, w, x, *how, node._saved_output_padding, node._saved_groups, [True] * 3
    )
    return tuple(found)


register(Elementwise(squared, linear=((0,), (1, 2)), pointwise=False), "MseLossBackwardBackward0")
register(Coupled(log_softmax), "LogSoftmaxBackwardDataBackward0")
register(Coupled(softmax), "SoftmaxBackwardDataBackward0")
register(Coupled(nll, linear=True), "NllLossBackwardBackward0", "NllLoss2DBackwardBackward0")
register(Coupled(average, linear=True), "AvgPool2DBackwardBackward0", "AvgPool3DBackwardBackward0")
register(
    Coupled(adaptive_average, linear=True), "AdaptiveAvgPool2DBackwardBackward0", "AdaptiveAvgPool3DBackwardBackward0"
)
register(Coupled(convolution, outputs=3), "ConvolutionBackwardBackward0")
