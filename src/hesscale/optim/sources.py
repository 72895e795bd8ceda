"""Where an optimizer's curvature comes from: a source fills ``p.grad`` and ``p.curvature``, as ``backward`` does.

A source is a value: ``CurvatureScaled(params, source=Propagated("hesscale_gn"))``. One that can ride on torch's own
backward pass can be attached to a loss; the others take passes of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import leaves
from ..backward import attach
from ..backward import backward as curvature_backward
from ..columns.dial import Rank, checked_rank
from ..columns.hutchinson import hutchinson
from ..columns.sampled import sampled_gauss_newton
from ..graph import wide
from ..recomputing import recomputed_once

RANKED = ("hesscale", "hesscale_gn")

_NO_PARAMETER = (
    "the loss depends on no parameter of this optimizer (sampled curvature cannot see parameters that "
    "fully_shard has sharded: use AdaHesScale or AdaHesScaleGN for those)"
)
_NOT_ATTACHED = (
    "curvature by {name} takes a pass of its own and cannot be attached to a loss: call optimizer.backward(loss), or "
    "let the trainer run within `with optimizer.armed():`"
)


class Source(ABC):
    """A way to curvature. ``options`` are the source's own, such as ``generator``.

    >>> class NeverNegative(hesscale.optim.Source):
    ...     name = "hesscale"
    ...     def __call__(self, loss, params, *, retain_graph, **options):
    ...         hesscale.backward(loss, retain_graph=retain_graph, **options)
    ...         for p in params:
    ...             p.curvature.clamp_(min=0)
    """

    attaches: ClassVar[bool] = False
    name: str
    """What the passes of this source note on curvature (``leaves.add``)."""

    @abstractmethod
    def __call__(self, loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, **options: Any) -> None:
        """Fills ``p.grad`` and ``p.curvature``."""

    def attach(self, loss: Tensor, **options: Any) -> Tensor:
        """The same loss, whose ``backward`` is going to fill ``p.curvature``."""
        raise RuntimeError(_NOT_ATTACHED.format(name=self.name))


@dataclass(frozen=True)
class Propagated(Source):
    """One of the methods of ``hesscale.backward``, with its options; ``rank`` is that of every pass.

    >>> model = nn.Linear(4, 3)
    >>> source = hesscale.optim.Propagated("hesscale", rank=1)
    >>> optimizer = hesscale.optim.CurvatureScaled(model.parameters(), source=source)
    """

    name: str = "hesscale"
    rank: Rank = 0
    attaches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if checked_rank(self.rank) and self.name not in RANKED:
            raise ValueError(f"rank= goes with the methods {' and '.join(RANKED)}, not with {self.name}")

    def __call__(self, loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, **options: Any) -> None:
        curvature_backward(loss, method=self.name, rank=self.rank, retain_graph=retain_graph, **options)

    def attach(self, loss: Tensor, **options: Any) -> Tensor:
        return attach(loss, method=self.name, rank=self.rank, **options)


def with_rank(source: Source | None, rank: Rank) -> Source:
    """The same source with so many columns carried beside the diagonal."""
    if not isinstance(source, Propagated):
        raise ValueError("rank= goes with AdaHesScale and AdaHesScaleGN, whose curvature hesscale.backward propagates")
    return replace(source, rank=rank)


@dataclass(frozen=True)
class Hutchinson(Source):
    """One random probe v ∘ Hv; options are those of ``hutchinson_backward``.

    >>> model = nn.Linear(4, 3)
    >>> source = hesscale.optim.Hutchinson(spatial_average=False)
    >>> optimizer = hesscale.optim.CurvatureScaled(model.parameters(), source=source)
    """

    spatial_average: bool = True
    name: str = field(default="hutchinson", init=False)

    def __call__(self, loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, **options: Any) -> None:
        options = {"spatial_average": self.spatial_average, **options}
        hutchinson_backward(loss, params, retain_graph=retain_graph, **options)


@dataclass(frozen=True)
class SampledGaussNewton(Source):
    """One random draw per example of the Gauss-Newton diagonal; options of ``sampled_gauss_newton_backward``.

    >>> model = nn.Linear(4, 3)
    >>> source = hesscale.optim.SampledGaussNewton()
    >>> optimizer = hesscale.optim.CurvatureScaled(model.parameters(), source=source, scale="mean")
    """

    name: str = field(default="ggn_mc", init=False)

    def __call__(self, loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, **options: Any) -> None:
        sampled_gauss_newton_backward(loss, params, retain_graph=retain_graph, **options)


def hutchinson_backward(
    loss: Tensor,
    params: Sequence[Tensor],
    *,
    spatial_average: bool = True,
    generator: torch.Generator | None = None,
    retain_graph: bool = False,
) -> None:
    """Curvature v ∘ Hv for one v of random signs, by double backward; see ``hesscale.columns.hutchinson``."""
    gradients, curvatures = hutchinson(
        loss, params, spatial_average=spatial_average, generator=generator, retain_graph=retain_graph
    )
    reached = [(p, g) for p, g in zip(params, gradients, strict=True) if g is not None]
    # through torch's own accumulation, so that hooks on it (DDP's among them) see these gradients
    run = partial(torch.autograd.backward, [p for p, _ in reached], [g for _, g in reached])
    _write(params, curvatures, "hutchinson", run)


@recomputed_once()
def sampled_gauss_newton_backward(
    loss: Tensor,
    params: Sequence[Tensor],
    *,
    output: Tensor | None = None,
    generator: torch.Generator | None = None,
    retain_graph: bool = False,
) -> None:
    """Curvature Σ_n (J_nᵀv_n)² with one draw for each example n; see ``hesscale.columns.sampled``."""
    curvatures = sampled_gauss_newton(loss, params, output=output, generator=generator)
    _write(params, curvatures, "ggn_mc", partial(loss.backward, retain_graph=retain_graph))


def _write(params: Sequence[Tensor], curvatures: Sequence[Tensor | None], method: str, run: Callable[[], None]) -> None:
    """Gives each parameter its curvature once ``run`` has written its gradient."""
    reached = [(p, s) for p, s in zip(params, curvatures, strict=True) if s is not None]
    if not reached:
        raise RuntimeError(_NO_PARAMETER)
    for p, _ in reached:
        leaves.drop_if_cleared(p)
    run()
    taken: set[int] = set()
    for p, s in reached:
        leaves.add(p, leaves.owned(s.detach().to(wide(s.dtype)), p, taken), method=method)
