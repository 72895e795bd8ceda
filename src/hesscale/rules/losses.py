"""Loss functions that are nodes of their own. Their reduction is part of f: c is 1/n for a mean, else 1."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .calculus import added, pull, sigmoid_slope
from .families import Coupled, Elementwise, Factor, Pair, Selection
from .table import register

Pairs = tuple[Pair, ...]
_MEAN = 1  # torch's code of reduction="mean"

# −w·x of the target class: linear, each log-probability in one output at most. Class weights, ignored targets and the
# reduction are all in torch's own backward.
register(Selection(scaled=True), "NllLossBackward0", "NllLoss2DBackward0")


def _reduction(node: Any) -> float:
    return 1 / max(node._saved_self.numel(), 1) if node._saved_reduction == _MEAN else 1.0


def _of_difference(node: Any, first: Tensor, second: Factor) -> Pairs:
    """A function of x − t: the target's derivatives are those of x, up to sign."""
    c = _reduction(node)
    pair = c * first, None if second is None else c * second
    return pair, pair


def squared(node: Any) -> Pairs:
    """(x − t)²."""
    return _of_difference(node, 2 * (node._saved_self - node._saved_target), 2.0)


def smooth_l1(node: Any) -> Pairs:
    """d²/(2β) for |d| < β, else |d| − β/2."""
    d, beta = node._saved_self - node._saved_target, node._saved_beta
    inside = d.abs() < beta
    first = torch.where(inside, d / beta if beta else d, d.sign())
    return _of_difference(node, first, inside.to(d.dtype) / beta if beta else None)


def huber(node: Any) -> Pairs:
    """d²/2 for |d| ≤ δ, else δ(|d| − δ/2)."""
    d, delta = node._saved_self - node._saved_target, node._saved_delta
    inside = d.abs() <= delta
    return _of_difference(node, torch.where(inside, d, delta * d.sign()), inside.to(d.dtype))


def binary_cross_entropy(node: Any) -> Pairs:
    """−w(t log p + (1−t) log(1−p)):  w(p−t)/(p(1−p)),  w(t/p² + (1−t)/(1−p)²);  linear in t."""
    p, t = node._saved_self, node._saved_target
    weight = _weight(node)
    # torch bounds log at −100 and the denominator at 1e-12; the same bound keeps f'' finite at p = 0 and 1
    first = weight * (p - t) / (p * (1 - p)).clamp_min(1e-12)
    second = weight * (t / p.square().clamp_min(1e-24) + (1 - t) / (1 - p).square().clamp_min(1e-24))
    return (first, second), (weight * ((1 - p).log().clamp_min(-100) - p.log().clamp_min(-100)), None)


def binary_cross_entropy_with_logits(node: Any) -> Pairs:
    """w((1−t)x + l·softplus(−x)), l = 1 + (v−1)t:  w((1−t)σ − vt(1−σ)),  w l σ(1−σ);  linear in t."""
    x, t, positive = node._saved_self, node._saved_target, node._saved_pos_weight
    weight, sigma, others = _weight(node), torch.sigmoid(x), torch.sigmoid(-x)
    gain: Tensor | float = 1.0 if positive is None else positive
    first = weight * ((1 - t) * sigma - gain * t * others)
    second = weight * (1 + (gain - 1) * t) * sigma * others
    return (first, second), (weight * ((gain - 1) * F.softplus(-x) - x), None)


def _weight(node: Any) -> Tensor | float:
    weight = node._saved_weight
    return _reduction(node) if weight is None else _reduction(node) * weight


def soft_margin(node: Any) -> Pairs:
    """log(1 + e^(−tx)):  −tσ(−tx),  t²σ(1−σ)."""
    t, c = node._saved_target, _reduction(node)
    tx = t * node._saved_self
    return ((-c * t * torch.sigmoid(-tx), c * t.square() * sigmoid_slope(tx)),)


def margins(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Piecewise linear, each score in one output: the node's own derivatives, squared."""
    if s is None:
        return None
    (moved,), (once,) = pull(node, s), pull(node, torch.ones_like(s))
    return None if moved is None or once is None else moved * once


def multi_margin(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Σ_{i≠y} w_y max(0, m − x_y + x_i)^p / C. For p = 2 each active i adds 2w_y/C at i and at y."""
    transport = margins(node, s, g)
    if g is None or node._saved_p == 1:
        return transport
    x, y = torch.atleast_2d(node._saved_self), torch.atleast_1d(node._saved_target).unsqueeze(1)
    active = (node._saved_margin - x.gather(1, y) + x > 0).scatter(1, y, False).to(x.dtype)
    bend = active.scatter(1, y, active.sum(1, keepdim=True)) * (2 / x.shape[1])
    if node._saved_weight is not None:
        bend = bend * node._saved_weight[y]
    if node._saved_reduction == _MEAN:
        bend = bend / x.shape[0]
    residual = bend * (g.unsqueeze(-1) if g.dim() == 1 else g)
    return added(transport, residual.reshape(node._saved_self.shape))


register(Elementwise(squared), "MseLossBackward0")
register(Elementwise(smooth_l1), "SmoothL1LossBackward0")
register(Elementwise(huber), "HuberLossBackward0")
register(Elementwise(binary_cross_entropy, linear=((1,),)), "BinaryCrossEntropyBackward0")
register(
    Elementwise(binary_cross_entropy_with_logits, linear=((1,),)),
    "BinaryCrossEntropyWithLogitsBackward0",
)
register(Elementwise(soft_margin), "SoftMarginLossBackward0")
register(Coupled(margins), "MultilabelMarginLossBackward0")
register(Coupled(multi_margin), "MultiMarginLossBackward0")
