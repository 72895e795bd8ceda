"""Probabilities q that sum to one, such as a softmax's, with all digits of 1 − q where one of them leads.

In floating point 1 − q of a confident prediction is rounding. Where q > ½ it is taken for what it is, the sum of all
others, which are small and accurate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .calculus import added

Dims = int | list[int]


def apart(q: Tensor, dim: Dims) -> tuple[Tensor, Tensor, Tensor]:
    """q as a sum of two, those up to ½ and the one above it (zero elsewhere), and the sum of the former."""
    lead = F.hardshrink(q, 0.5)
    small = q - lead
    return small, lead, small.sum(dim, keepdim=True)


def complement(q: Tensor, dim: Dims) -> Tensor:
    """1 − q."""
    small, lead, rest = apart(q, dim)
    leads = lead.sign_()
    return torch.addcmul(1 - small - leads, leads, rest)


def spread(q: Tensor, dim: Dims) -> Tensor:
    """q(1 − q)."""
    small, lead, rest = apart(q, dim)
    return torch.addcmul(small, small, small, value=-1).addcmul_(lead, rest)


def through_softmax(q: Tensor, s: Tensor | None, g: Tensor | None, dim: int = -1) -> Tensor | None:
    """The curvature of x in q = softmax(x):  q²(s − 2qs + Σ q²s) + q(1 − 2q)(g − Σ qg).

    That is  q(q Σ q²s + (1 − 2q)(qs + g − Σ qg)), which takes fewer sweeps. For a q that leads, with sums over the
    others only, it is  q(q((1 − q)² s + Σ q²s) + (1 − 2q)((1 − q)g − Σ qg)).
    """
    if s is None and g is None:
        return None
    small, lead, rest = apart(q, dim)
    top = lead.sum(dim, keepdim=True)
    inner = at_lead = everywhere = None

    def sums(of_small: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Σ over all but the leader, and the leader's t."""
        return of_small.sum(dim, keepdim=True), (lead * t).sum(dim, keepdim=True).div_(top.clamp_min(0.5))

    if g is not None:
        others, own = sums(small * g, g)
        inner = g - torch.addcmul(others, top, own)
        at_lead = (rest * own).sub_(others).mul_(1 - 2 * top)
    if s is not None:
        weighted = small * s
        others, own = sums(small * weighted, s)
        inner = weighted if inner is None else inner.add_(weighted)
        at_lead = added(at_lead, torch.addcmul(others, rest.square(), own).mul_(top))
        everywhere = torch.addcmul(others, top.square(), own)
    assert inner is not None and at_lead is not None
    result = torch.addcmul(inner, small, inner, value=-2)
    if everywhere is not None:
        result.addcmul_(small, everywhere)
    return result.mul_(small).addcmul_(lead, at_lead)
