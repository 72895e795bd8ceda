"""Sampled curvature for the optimizers that compare: one Hutchinson probe, or one draw of the Gauss-Newton diagonal.

Both write ``p.grad`` and ``p.curvature`` as ``hesscale.backward`` does: adding up, and afresh where ``p.grad`` is None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..columns.hutchinson import hutchinson
from ..columns.sampled import sampled_gauss_newton

_NO_PARAMETER = (
    "the loss depends on no parameter of this optimizer (sampled curvature cannot see parameters that "
    "fully_shard has sharded: use AdaHesScale or AdaHesScaleGN for those)"
)


def hutchinson_backward(
    loss: Tensor,
    params: Sequence[Tensor],
    *,
    spatial_average: bool = True,
    generator: torch.Generator | None = None,
    retain_graph: bool = False,
) -> None:
    """Curvature v ∘ Hv for one v of random signs; see ``hesscale.columns.hutchinson``."""
    gradients, curvatures = hutchinson(
        loss, params, spatial_average=spatial_average, generator=generator, retain_graph=retain_graph
    )
    _accumulate(params, curvatures)
    # through torch's own accumulation, so that hooks on it (DDP's among them) see these gradients
    reached = [(p, g) for p, g in zip(params, gradients, strict=True) if g is not None]
    torch.autograd.backward([p for p, _ in reached], [g for _, g in reached])


def sampled_gauss_newton_backward(
    loss: Tensor,
    params: Sequence[Tensor],
    *,
    output: Tensor | None = None,
    generator: torch.Generator | None = None,
    retain_graph: bool = False,
) -> None:
    """Curvature Σ_n (J_nᵀv_n)² with one draw for each example n; see ``hesscale.columns.sampled``."""
    _accumulate(params, sampled_gauss_newton(loss, params, output=output, generator=generator))
    loss.backward(retain_graph=retain_graph)


def _accumulate(params: Sequence[Tensor], curvatures: Sequence[Tensor | None]) -> None:
    reached = [(p, s) for p, s in zip(params, curvatures, strict=True) if s is not None]
    if not reached:
        raise RuntimeError(_NO_PARAMETER)
    for p, curvature in reached:
        old: Tensor | None = None if p.grad is None else getattr(p, "curvature", None)
        p.curvature = curvature if old is None else old.add_(curvature)  # type: ignore[attr-defined]
