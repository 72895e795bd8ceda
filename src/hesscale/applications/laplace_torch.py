"""A backend for laplace-torch, so that its users switch with one argument; it needs that package (extra ``laplace``).

la = Laplace(model, "classification", hessian_structure="diag", backend=HesScaleBackend)
la = Laplace(..., backend=HesScaleBackend, backend_kwargs={"method": "hesscale", "rank": 3})
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..columns.dial import Rank
from ..estimators import estimate

try:
    from laplace.curvature import GGNInterface
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hesscale.applications.laplace_torch needs laplace-torch: pip install 'hesscale[laplace]'", name=error.name
    ) from error


class HesScaleBackend(GGNInterface):  # type: ignore[misc, unused-ignore]
    """The diagonal of any method of ``hesscale.estimate``. Negative entries are set to zero, as a precision needs.

    It is an interface to the Gauss-Newton matrix since subnetworks take no other.
    """

    def __init__(
        self,
        *args: Any,
        method: str = "hesscale_gn",
        rank: Rank = 0,
        samples: int = 1,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._how: dict[str, Any] = {"rank": rank, "samples": samples, "generator": generator}
        self._method = method

    def diag(self, x: Any, y: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """The loss of a batch, summed over its examples, and the diagonal of its curvature as a vector."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        wanted = [names[id(p)] for p in self.params]
        found = estimate(self._method, self.model, self._loss, ((x,), y), params=wanted, **self._how)
        h = torch.cat([found[name].flatten() for name in wanted]).clamp(min=0.0)
        with torch.no_grad():
            loss = self._loss(self.model(x), y)
        return loss, h if self.subnetwork_indices is None else h[self.subnetwork_indices]

    def full(self, *_: Any, **__: Any) -> NoReturn:
        """There is none."""
        raise NotImplementedError("HesScaleBackend knows diagonals only: pass hessian_structure='diag'")

    kron = full

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.factor * self.lossfunc(outputs, targets)
        return loss
