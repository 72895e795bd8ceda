"""The optimizers by name: each is the template with a source of its own."""

from __future__ import annotations

from typing import final

from .curvature_scaled import CurvatureScaled
from .sources import Hutchinson, Propagated, SampledGaussNewton


@final
class AdaHesScale(CurvatureScaled):
    """Adam with HesScale's estimate of the Hessian diagonal in place of g² (Elsayed & Mahmood 2022: ``bound=None``).

    ``backward(loss, missing=…, generator=…)`` as in ``hesscale.backward``.

    >>> model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    >>> optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3)
    >>> optimizer.zero_grad()
    >>> optimizer.backward(F.cross_entropy(model(x), y))
    >>> optimizer.step()
    """

    SOURCE = Propagated("hesscale")


@final
class AdaHesScaleGN(CurvatureScaled):
    """Adam with the Gauss-Newton form of HesScale in place of g² (Elsayed & Mahmood 2022: ``bound=None``).

    ``backward(loss, output=…, missing=…, generator=…)`` as in ``hesscale.backward``:
    ``output`` says where the loss begins.

    >>> model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    >>> optimizer = hesscale.AdaHesScaleGN(model.parameters(), lr=1e-3)
    >>> optimizer.zero_grad()
    >>> optimizer.backward(F.cross_entropy(model(x), y))
    >>> optimizer.step()
    """

    SOURCE = Propagated("hesscale_gn")


@final
class AdaBL89(CurvatureScaled):
    """Adam with the diagonal of Becker & LeCun (1989) in place of g²; for comparison.

    ``backward(loss, missing=…, generator=…)`` as in ``hesscale.backward``.

    >>> model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    >>> optimizer = hesscale.AdaBL89(model.parameters(), lr=1e-3)
    >>> optimizer.zero_grad()
    >>> optimizer.backward(F.cross_entropy(model(x), y))
    >>> optimizer.step()
    """

    SOURCE = Propagated("bl89")


@final
class AdaGGNMC(CurvatureScaled):
    """Adam with one sample of the Gauss-Newton diagonal in place of g²; for comparison.

    The paper's experiments take its plain average: ``scale="mean"``. ``backward(loss, output=…, generator=…)``:
    ``output`` only makes sure that the loss was found where it begins.

    >>> model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    >>> optimizer = hesscale.AdaGGNMC(model.parameters(), lr=1e-3, scale="mean")
    >>> optimizer.zero_grad()
    >>> optimizer.backward(F.cross_entropy(model(x), y))
    >>> optimizer.step()
    """

    SOURCE = SampledGaussNewton()


@final
class AdaHessian(CurvatureScaled):
    """Adam with one Hutchinson probe of the Hessian diagonal in place of g² (Yao et al. 2021); for comparison.

    The authors' settings are lr=0.15, eps=1e-4 and bound=None. ``backward(loss, spatial_average=True, generator=…)``:
    kernels of 2-d convolutions get the mean of ``|v ∘ Hv|`` over their two spatial dimensions.

    >>> model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    >>> optimizer = hesscale.AdaHessian(model.parameters(), lr=0.15, eps=1e-4, bound=None)
    >>> optimizer.zero_grad()
    >>> optimizer.backward(F.cross_entropy(model(x), y))
    >>> optimizer.step()
    """

    SOURCE = Hutchinson()
