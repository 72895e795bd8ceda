"""Hutchinson's estimate of the Hessian diagonal: v ∘ Hv for random signs v, by double backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..double_backward import refuse_wrong_derivatives
from ..recomputing import recomputed_once

Found = list[Tensor | None]


@recomputed_once()
def hutchinson(
    loss: Tensor,
    params: Sequence[Tensor],
    *,
    generator: torch.Generator | None = None,
    samples: int = 1,
    at_once: int = 1,
    spatial_average: bool = False,
    retain_graph: bool = False,
) -> tuple[Found, Found]:
    """The gradients, and the mean of v ∘ Hv over probes v of random signs; None where the loss does not depend on p.

    Unbiased for diag H (Bekas et al. 2007), with the variance Σ_{j≠i} H_ij² / samples at entry i. ``at_once`` is how
    many probes memory has room for. ``spatial_average``: kernels of 2-d convolutions get the mean of |v ∘ Hv| over
    their two spatial dimensions, as in AdaHessian (Yao et al. 2021).
    """
    refuse_wrong_derivatives(loss)
    gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    reached = [(p, g) for p, g in zip(params, gradients, strict=True) if g is not None]
    totals = [torch.zeros_like(p, requires_grad=False) for p, _ in reached]
    for start in range(0, samples, at_once):
        count = min(at_once, samples - start)
        probes = [random_signs((count, *p.shape), p, generator) for p, _ in reached]
        products = _products(reached, probes, retain_graph=retain_graph or start + count < samples)
        for total, v, hv in zip(totals, probes, products, strict=True):
            if hv is not None:
                total.add_(_averaged(v.mul_(hv), spatial_average).sum(0), alpha=1 / samples)
    found = iter(totals)
    return [None if g is None else g.detach() for g in gradients], [
        None if g is None else next(found) for g in gradients
    ]


def random_signs(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """±1 with equal chances, of the dtype and on the device of ``like``, drawn where the generator lives."""
    device = like.device if generator is None else generator.device
    bits = torch.randint(0, 2, tuple(shape), generator=generator, device=device)
    return bits.to(like.device, like.dtype).mul_(2).sub_(1)


def _products(
    reached: Sequence[tuple[Tensor, Tensor]], probes: Sequence[Tensor], *, retain_graph: bool
) -> Sequence[Tensor | None]:
    curved = [(g, v) for (_, g), v in zip(reached, probes, strict=True) if g.requires_grad]
    if not curved:  # the loss is linear in all of them
        return [None] * len(reached)
    ys, vs, xs = [g for g, _ in curved], [v for _, v in curved], [p for p, _ in reached]
    if len(vs[0]) == 1:
        return _by_one(ys, xs, [v[0] for v in vs], retain_graph)
    try:
        return torch.autograd.grad(ys, xs, vs, allow_unused=True, retain_graph=True, is_grads_batched=True)
    except RuntimeError:  # some backward formulas cannot be vmapped; a real error comes again
        rows = [_by_one(ys, xs, v, True) for v in zip(*vs, strict=True)]
        return [None if row[0] is None else torch.cat(row) for row in zip(*rows, strict=True)]


def _by_one(
    ys: Sequence[Tensor], xs: Sequence[Tensor], v: Sequence[Tensor], retain_graph: bool
) -> Sequence[Tensor | None]:
    found = torch.autograd.grad(ys, xs, v, allow_unused=True, retain_graph=retain_graph)
    return [None if hv is None else hv.unsqueeze(0) for hv in found]


def _averaged(curvature: Tensor, spatial_average: bool) -> Tensor:
    """``curvature`` is [samples, *shape]."""
    if spatial_average and curvature.dim() == 5:
        return curvature.abs().mean(dim=(3, 4), keepdim=True).expand_as(curvature)
    return curvature
