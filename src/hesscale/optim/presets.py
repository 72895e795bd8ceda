"""The optimizers by name. Each says which pass fills ``p.curvature``; all arithmetic is the template's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..backward import Missing
from ..backward import backward as curvature_backward
from .curvature_scaled import CurvatureScaled
from .sources import hutchinson_backward, sampled_gauss_newton_backward


@final
class AdaHesScale(CurvatureScaled):
    """Adam with HesScale's estimate of the Hessian diagonal in place of g² (Elsayed & Mahmood 2022)."""

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        missing: Missing = "raise",
        generator: torch.Generator | None = None,
    ) -> None:
        """Fills ``p.grad``, and ``p.curvature`` when it is due. Call it in place of ``loss.backward()``.

        ``missing`` and ``generator`` as in ``hesscale.backward``.
        """

        def curvature_pass() -> None:
            curvature_backward(loss, retain_graph=retain_graph, missing=missing, generator=generator)

        self._backward(loss, retain_graph, curvature_pass)


@final
class AdaHesScaleGN(CurvatureScaled):
    """Adam with the Gauss-Newton form of HesScale in place of g² (Elsayed & Mahmood 2022)."""

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        output: Tensor | Sequence[Tensor] | None = None,
        missing: Missing = "raise",
        generator: torch.Generator | None = None,
    ) -> None:
        """As ``AdaHesScale.backward``; ``output`` says where the loss begins, as in ``hesscale.backward``."""

        def curvature_pass() -> None:
            curvature_backward(
                loss,
                method="hesscale_gn",
                output=output,
                retain_graph=retain_graph,
                missing=missing,
                generator=generator,
            )

        self._backward(loss, retain_graph, curvature_pass)


@final
class AdaBL89(CurvatureScaled):
    """Adam with the diagonal of Becker & LeCun (1989) in place of g²; for comparison."""

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        missing: Missing = "raise",
        generator: torch.Generator | None = None,
    ) -> None:
        """As ``AdaHesScale.backward``."""

        def curvature_pass() -> None:
            curvature_backward(
                loss,
                method="bl89",
                retain_graph=retain_graph,
                missing=missing,
                generator=generator,
            )

        self._backward(loss, retain_graph, curvature_pass)


@final
class AdaGGNMC(CurvatureScaled):
    """Adam with one sample of the Gauss-Newton diagonal in place of g²; for comparison.

    The paper's experiments take its plain average: ``scale="mean"``.
    """

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        output: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """As ``AdaHesScale.backward``; see ``sampled_gauss_newton_backward`` for ``output``."""

        def curvature_pass() -> None:
            sampled_gauss_newton_backward(
                loss, self._trainable(), output=output, generator=generator, retain_graph=retain_graph
            )

        self._backward(loss, retain_graph, curvature_pass)


@final
class AdaHessian(CurvatureScaled):
    """Adam with one Hutchinson probe of the Hessian diagonal in place of g² (Yao et al. 2021); for comparison.

    The authors' settings are lr=0.15 and eps=1e-4.
    """

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        spatial_average: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        """As ``AdaHesScale.backward``, by a double backward; see ``hutchinson_backward`` for ``spatial_average``."""

        def curvature_pass() -> None:
            hutchinson_backward(
                loss,
                self._trainable(),
                spatial_average=spatial_average,
                generator=generator,
                retain_graph=retain_graph,
            )

        self._backward(loss, retain_graph, curvature_pass)
