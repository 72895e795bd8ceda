"""Safe step sizes for any torch optimizer: its update is shortened to what the curvature of the loss allows.

An inner optimizer (SGD, Adam, AdamW, …) would move the parameters by u. With c ≥ 0, a diagonal of curvature, the loss's
quadratic model gains ½ Σ c u² by that; ``TrustRegion`` multiplies u by min(1, √(2δ / Σ c u²)), so that it gains no
more than δ. All parameters of all groups share the factor: the direction is the inner optimizer's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..columns.dial import Rank, checked_rank
from ..estimators.problem import LossFunction
from ..graph import wide
from ..optim import checks
from ..optim.reading import ReadsCurvature
from ..optim.shards import local
from ..optim.sources import Hutchinson, Propagated, SampledGaussNewton, Source, with_rank
from ..optim.trust import shrinkage
from ..optim.updates import Place
from .over_batches import Batches, How, diagonal_over

_SOURCES: Mapping[str, Source | None] = {
    "hesscale": Propagated("hesscale"),
    "hesscale_gn": Propagated("hesscale_gn"),
    "bl89": Propagated("bl89"),
    "hutchinson": Hutchinson(),
    "ggn_mc": SampledGaussNewton(),
    "squared_gradient": None,  # read from p.grad itself
}
"""The methods that ride on the backward pass of training; all others come in by ``refresh``."""

_KEY = "trust_region"
"""Of our part in a state_dict, beside torch's own two."""


@dataclass
class _Average:
    """Σ over refreshes of c's share, not yet divided by what the shares add up to: 1 − βʳ after r of them."""

    value: Tensor
    weight: float

    @property
    def corrected(self) -> Tensor:
        return self.value / self.weight


class TrustRegion(ReadsCurvature):
    """An optimizer whose step is ``inner``'s, times min(1, √(2δ / Σ c u²)); ``math.inf`` for δ: ``inner``'s very step.

        c = EMA(|h|) / (1 − βʳ)     h: curvature of the batch by ``method``, in every ``every``-th step, r times so far

    An average, for one batch's h is noise where the batch is small; of |h|, for a sum in which negative curvature
    makes up for positive bounds nothing; with its bias corrected, for the first steps are the dangerous ones.
    ``beta=0``: the last |h| alone.

    Call ``optimizer.backward(loss)`` in place of ``loss.backward()``. ``method=None``: c is what ``refresh`` was given.
    Param groups, state and schedulers are those of ``inner``, and u is all it does, decoupled weight decay included.
    ``factor`` is what the last update was multiplied by. Parameters that have no curvature yet do not count.

    >>> model, x = nn.Linear(2, 1), torch.randn(8, 2)
    >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = hesscale.applications.step_size.TrustRegion(inner, delta=0.01)
    >>> optimizer.backward(model(x).square().mean())
    >>> optimizer.step()
    """

    inner: Optimizer
    delta: float
    method: str | None
    every: int
    beta: float
    factor: float
    _averages: dict[Tensor, _Average]
    _wait: int  # so many steps until c is refreshed

    def __init__(
        self,
        inner: Optimizer,
        delta: float,
        *,
        method: str | None = "hesscale",
        rank: Rank = 0,
        every: int = 1,
        beta: float = 0.99,
    ) -> None:
        _refuse_bad_options(inner, delta, method, every, beta)
        source = None if method is None else _SOURCES[method]
        own = {"inner": inner, "delta": delta, "method": method, "every": every, "beta": beta, "factor": 1.0}
        own |= {"source": with_rank(source, rank) if checked_rank(rank) else source, "_averages": {}, "_wait": 0}
        self.__setstate__(own)

    # what torch's base class keeps, and schedulers look at, is the inner optimizer's

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the inner optimizer."""
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer; the next step is going to need curvature."""
        self.inner.add_param_group(param_group)
        self._wait = 0
        self._watch_shards()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("inner", "delta", "method", "every", "beta", "factor", "source", "_averages", "_wait")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_afresh()

    def __repr__(self) -> str:
        return f"TrustRegion(delta={self.delta:g}, method={self.method!r}, every={self.every}, inner={self.inner!r})"

    @property
    def curvature_due(self) -> bool:
        """Whether the next ``step`` reads ``p.curvature``."""
        return self.method is not None and self._wait == 0

    def backward(self, loss: Tensor, *, retain_graph: bool = False, **options: Any) -> None:
        """Fills ``p.grad``, and ``p.curvature`` when it is due; ``options`` are those of ``hesscale.backward``."""
        if self.source is None:
            loss.backward(retain_graph=retain_graph)
        else:
            super().backward(loss, retain_graph=retain_graph, **options)

    def attach(self, loss: Tensor, **options: Any) -> Tensor:
        """The same ``loss``; when curvature is due, a ``.backward()`` on it fills ``p.curvature`` too."""
        return loss if self.source is None else super().attach(loss, **options)

    def armed(self, **options: Any) -> AbstractContextManager[None]:
        """Within it every ``backward`` that reaches these parameters fills ``p.curvature`` when due."""
        return nullcontext() if self.source is None else super().armed(**options)

    def refresh(
        self, model: nn.Module, loss_fn: LossFunction | None = None, batches: Batches | None = None, **how: Unpack[How]
    ) -> None:
        """Makes c the absolute diagonal over these batches by any method, or a given one: ``diagonal=``.

        It stays until the next ``refresh`` if ``method=None``; else it is one more share of the average.
        """
        found = diagonal_over(model, loss_fn, batches, **how)
        known = {id(p) for group in self.param_groups for p in group["params"]}
        named = {name: p for name, p in model.named_parameters() if name in found and id(p) in known}
        if not named:
            raise ValueError("none of these parameters belongs to this optimizer: it was made for another model")
        for name, p in named.items():
            h = found[name].to(wide(p.dtype))
            self._average(p, h, beta=0.0 if self.method is None else self.beta)

    def _update(self) -> None:
        if self.method is None and not self._averages:
            raise RuntimeError(
                "nothing limits this step: with method=None call optimizer.refresh(model, ...) before it"
            )
        self._run_curvature_hooks()
        places = [
            (group, i) for group in self.param_groups for i, p in enumerate(group["params"]) if p.grad is not None
        ]
        moving = [group["params"][index] for group, index in places]
        fresh = [self._fresh(place) for place in places]
        if hasattr(self, "found_inf"):
            self._unscale([local(p.grad) for p in moving], [h for h in fresh if h is not None])
        if self.method == "squared_gradient" and self.curvature_due:
            fresh = [local(p.grad).to(wide(p.dtype)).square() for p in moving]
        bad = _non_finite(places, fresh)
        if bad and not hasattr(self, "found_inf"):
            raise RuntimeError(f"{bad}; nothing was changed")
        if bad:
            warnings.warn(f"{bad}, under the loss scale: step skipped; use a lower scale", stacklevel=4)
            return
        self._move(moving, fresh)
        if self.method is not None:
            self._wait = (self._wait or self.every) - 1

    def _fresh(self, place: Place) -> Tensor | None:
        group, index = place
        p = group["params"][index]
        reads = self.curvature_due and self.source is not None
        h = checks.fresh_curvature(p, p.grad, place, is_due=reads, source=self.source)
        return None if h is None else local(h)

    def _average(self, p: Tensor, h: Tensor, *, beta: float) -> None:
        old = self._averages.get(p)
        if old is None or not beta:
            self._averages[p] = _Average(h.abs() * (1 - beta), 1 - beta)
        else:
            self._averages[p] = _Average(old.value.lerp(h.abs(), 1 - beta), 1 - beta * (1 - old.weight))

    def _move(self, moving: list[Tensor], fresh: list[Tensor | None]) -> None:
        before = [local(p).detach().clone() for p in moving]
        with torch.enable_grad():  # as if it were called by the user
            self.inner.step()
        for p, h in zip(moving, fresh, strict=True):  # not before: where that raises, this batch must not count
            if h is not None:
                self._average(p, h, beta=self.beta)
        moves = [
            (self._averages[p].corrected, local(p).to(wide(p.dtype)) - old, p)
            for p, old in zip(moving, before, strict=True)
            if p in self._averages
        ]
        self.factor = float(shrinkage(self.delta, moves)) if moves else 1.0
        if self.factor < 1.0:
            for p, old in zip(moving, before, strict=True):
                here = local(p)
                here.copy_(old.to(wide(p.dtype)).lerp(here.to(wide(p.dtype)), self.factor))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, which can load it as well, with our averages under a key of their own."""
        index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        averages = {index[p]: (a.value, a.weight) for p, a in self._averages.items() if p in index}
        return {**self.inner.state_dict(), _KEY: {"wait": self._wait, "averages": averages}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a state of this class; or of the inner optimizer alone, and c begins afresh."""
        own = state_dict.get(_KEY, {"wait": 0, "averages": {}})
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})
        params = [p for group in self.param_groups for p in group["params"]]
        self._wait = own["wait"]
        self._averages = {
            params[i]: _Average(value.detach().clone().to(params[i].device), weight)
            for i, (value, weight) in own["averages"].items()
        }


def _refuse_bad_options(inner: Any, delta: float, method: str | None, every: int, beta: float) -> None:
    if not isinstance(inner, Optimizer):
        raise TypeError(f"TrustRegion wraps a torch optimizer, not a {type(inner).__name__}: pass one first")
    if isinstance(inner, ReadsCurvature):
        raise TypeError(f"{type(inner).__name__} reads curvature itself: use its own trust_region= instead")
    if isinstance(inner, torch.optim.LBFGS):
        raise TypeError("LBFGS takes several steps in one, by a line search of its own: it cannot be scaled")
    if inner.defaults.get("differentiable"):
        raise ValueError("a scaled step cannot be differentiated: make the inner optimizer with differentiable=False")
    rows = (
        (not math.isnan(delta) and delta > 0, f"delta must be positive: {delta}"),
        (method is None or method in _SOURCES, f"unknown method {method!r}: choose {', '.join(map(repr, _SOURCES))}"),
        (isinstance(every, int) and every >= 1, f"every must be a whole number of steps, 1 or more: {every}"),
        (0.0 <= beta < 1.0, f"beta must lie in [0, 1): {beta}"),
    )
    for is_fine, message in rows:
        if not is_fine:
            raise ValueError(message)


def _non_finite(places: Sequence[Place], fresh: Sequence[Tensor | None]) -> str | None:
    """What holds an inf or a nan, in words."""
    rows = [
        (what, place, x)
        for place, h in zip(places, fresh, strict=True)
        for what, x in (("gradient", local(place[0]["params"][place[1]].grad)), ("curvature", h))
        if x is not None
    ]
    # norms are one call for all of them; those of huge numbers are infinite though the numbers are not
    suspects = [row for row, norm in zip(rows, _norms([x for *_, x in rows]), strict=True) if not math.isfinite(norm)]
    bad = (f"the {what} of {checks.name_of(place)} is not finite" for what, place, x in suspects if not _is_finite(x))
    return next(bad, None)


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    found = torch._foreach_norm([*tensors]) if tensors else ()
    return torch.stack([norm.to("cpu", torch.float64) for norm in found]).tolist() if found else []


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())
