"""Which weights matter least, and networks without them: Optimal Brain Damage (LeCun et al. 1989) with any diagonal.

Setting w to zero changes the loss, in its quadratic model with a diagonal Hessian, by

    s = −g w + ½ h w²        order="second"
    s =        ½ h w²        order="obd": at a minimum, where g = 0

Weights of the least |s| go first. The absolute value, because torch's own pruning methods take it, and because a weight
of negative curvature is not one to do without: the model holds for small changes, and s < 0 says that this is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from ..estimators.problem import LossFunction
from ..graph import wide
from .masks import Place, apply_masks, noting_calls, places, refuse_shared, refuse_uncalled
from .masks import load_pruned as load_pruned
from .over_batches import Batches, How, derivatives_over, diagonal_over
from .units import Groups, numbered, totals
from .units import heads as heads
from .units import neurons as neurons

Order = Literal["obd", "second"]
Scores = dict[tuple[nn.Module, str], Tensor]
"""By module and name of its parameter, as ``torch.nn.utils.prune.global_unstructured`` wants them."""


@dataclass(frozen=True)
class Pruned:
    """What a network lost.

    >>> model, batches = nn.Linear(4, 2), [(torch.randn(8, 4), torch.randn(8, 2))]
    >>> hesscale.applications.pruning.prune(model, 0.5, F.mse_loss, batches).sparsity
    0.5
    """

    sparsity: float  # the share of zeros among the weights that took part
    by_parameter: Mapping[str, float]  # the same for each of them
    rounds: tuple[float, ...]  # the share of weights, or of groups, removed after each round

    def __str__(self) -> str:
        lines = [f"  {name}: {share:.1%}" for name, share in self.by_parameter.items()]
        times = "one round" if len(self.rounds) == 1 else f"{len(self.rounds)} rounds"
        return "\n".join([f"{self.sparsity:.1%} of the weights removed in {times}", *lines])


def saliencies(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    batches: Batches | None = None,
    *,
    order: Order = "obd",
    **how: Unpack[How],
) -> dict[str, Tensor]:
    """s of every weight by name, with its sign: below zero where the model says that the loss would fall.

    Of matrices, filters and the like; of biases and other vectors where ``params`` names them. Weights that are masked
    already have 0. Names are those from before pruning. In float32 if the model is in half precision.

    >>> model, batches = nn.Linear(2, 1, bias=False), [(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1))]
    >>> model.weight.data.fill_(1.0)
    tensor([[1., 1.]])
    >>> hesscale.applications.pruning.saliencies(model, F.mse_loss, batches)
    {'weight': tensor([[1., 9.]])}
    """
    if order not in ("obd", "second"):
        raise ValueError(f'order must be "obd" or "second", not {order!r}')
    chosen = places(model, how.get("params"))
    how = _of_today(how, chosen)
    gradient: Mapping[str, Tensor] = {}
    if order == "second":
        gradient, diagonal = derivatives_over(model, loss_fn, batches, **how)
    else:
        diagonal = diagonal_over(model, loss_fn, batches, **how)
    found = {}
    for name, place in chosen.items():
        w = place.weight
        w = w.to(wide(w.dtype))  # squares of small weights are zero in half precision
        found[name] = diagonal[place.today] * w.square() / 2
        if gradient:
            found[name] -= gradient[place.today] * w
    return found


def scores(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    batches: Batches | None = None,
    *,
    order: Order = "obd",
    groups: Groups | None = None,
    **how: Unpack[How],
) -> Scores:
    """|s| by module and name of its parameter, for ``importance_scores=`` of ``torch.nn.utils.prune``.

    With ``groups`` (see ``neurons`` and ``heads``) every member of a group has the group's sum: what ``ln_structured``
    with n=1 ranks by.

    >>> model, batches = nn.Linear(2, 1), [(torch.randn(8, 2), torch.randn(8, 1))]
    >>> found = hesscale.applications.pruning.scores(model, F.mse_loss, batches)
    >>> torch.nn.utils.prune.global_unstructured(
    ...     [(model, "weight")], torch.nn.utils.prune.L1Unstructured, found, amount=0.5)
    """
    chosen, numbers, how = _chosen(model, groups, how)
    found = _absolute(model, loss_fn, batches, order, how)
    if groups is not None:
        sums = totals(found, numbers)
        found = {name: sums[numbers[name]].to(value.dtype) for name, value in found.items()}
    return {(place.module, place.own): found[name] for name, place in chosen.items()}


def prune(
    model: nn.Module,
    amount: float,
    loss_fn: LossFunction | None = None,
    batches: Batches | None = None,
    *,
    order: Order = "obd",
    groups: Groups | None = None,
    schedule: int | Sequence[float] = 1,
    fine_tune: Callable[[nn.Module], Any] | None = None,
    **how: Unpack[How],
) -> Pruned:
    """Masks the share ``amount`` of all weights (of all groups, with ``groups``), those masked before included.

    ``schedule``: the number of rounds, each of which leaves the same share of what it found; or the shares after each,
    the last of which is ``amount``. A round finds curvature anew and then calls ``fine_tune(model)``, where masks hold.
    An error while a round finds curvature leaves the model as the last round left it; in the first, as it was. An error
    of ``fine_tune`` leaves it masked as far as this round goes, and trained as far as that came.

    Torch applies a mask when the module is called: a weight that is read without (``F.linear(x, layer.weight)``, or out
    of an ``nn.ParameterList``) is refused; where a ``diagonal`` is given, no pass shows it: leave it out yourself.

    Masks are those of ``torch.nn.utils.prune``: ``weight_orig`` and ``weight_mask`` in place of ``weight``, both in
    ``state_dict`` (``load_pruned`` reads it into a fresh model), made final by ``torch.nn.utils.prune.remove``.

    >>> model, batches = nn.Linear(4, 2), [(torch.randn(8, 4), torch.randn(8, 2))]
    >>> print(hesscale.applications.pruning.prune(model, 0.5, F.mse_loss, batches))
    50.0% of the weights removed in one round
      weight: 50.0%
    """
    chosen, numbers, how = _chosen(model, groups, how)
    refuse_shared(model, chosen)
    there = totals({name: place.mask for name, place in chosen.items()}, numbers) > 0
    members = totals({name: torch.ones_like(place.parameter) for name, place in chosen.items()}, numbers) > 0
    count = int(members.sum())
    steps = _steps(amount, schedule, 1 - int(there.sum()) / count)
    _refuse_once_only(len(steps), batches, how)
    for step in steps:
        with noting_calls(model, chosen) as called:
            ranking = totals(_absolute(model, loss_fn, batches, order, how), numbers)
        if step == steps[0] and (order == "second" or how.get("diagonal") is None):
            refuse_uncalled(chosen, called)
        there = _without_lowest(ranking, there, count - round(step * count))
        apply_masks(model, chosen, {name: there[number] for name, number in numbers.items()})
        if fine_tune is not None:
            fine_tune(model)
    return _result(chosen, steps)


def _chosen(model: nn.Module, groups: Groups | None, how: How) -> tuple[dict[str, Place], dict[str, Tensor], How]:
    """Which weights take part, the group of each of their entries, and options that name them."""
    named = how.get("params")
    chosen = places(model, [*groups] if named is None and groups is not None else named)
    by_name = None
    if groups is not None:
        by_name = {name: value for key, value in groups.items() for name in places(model, [key])}
    changed = How(**how)
    changed["params"] = [*chosen]
    return chosen, numbered(chosen, by_name), changed


def _of_today(how: How, chosen: Mapping[str, Place]) -> How:
    """The same options with the names that parameters have now."""
    changed = How(**how)
    changed["params"] = [place.today for place in chosen.values()]
    given = how.get("diagonal")
    if given is not None:
        today = {place.name: place.today for place in chosen.values()}
        changed["diagonal"] = {today.get(name, name): value for name, value in given.items()}
    return changed


def _absolute(
    model: nn.Module, loss_fn: LossFunction | None, batches: Batches | None, order: Order, how: How
) -> dict[str, Tensor]:
    return {name: s.abs() for name, s in saliencies(model, loss_fn, batches, order=order, **how).items()}


def _without_lowest(ranking: Tensor, there: Tensor, left: int) -> Tensor:
    """Of the groups that are there, so many that rank highest."""
    order = ranking.masked_fill(~there, -torch.inf).argsort(descending=True, stable=True)
    kept = torch.zeros_like(there)
    kept[order[:left]] = True
    return kept


def _steps(amount: float, schedule: int | Sequence[float], before: float) -> list[float]:
    """The shares removed after each round."""
    if not _is_share(amount):
        raise ValueError(f"amount must be a share between 0 and 1, not {amount!r}: 0.9 removes 90 %")
    if before >= amount:
        raise ValueError(f"{before:.1%} is removed already: an amount counts that, and must be above it, not {amount}")
    if isinstance(schedule, Sequence):
        steps = [*schedule]
        if not steps or steps[-1] != amount or not all(a < b for a, b in zip([before, *steps], steps, strict=False)):
            raise ValueError(f"schedule must rise from above {before:g} to amount, {amount:g}; it is {steps}")
        return steps
    if isinstance(schedule, bool) or not isinstance(schedule, Integral) or schedule < 1:
        raise ValueError(f"schedule must be a number of rounds from 1, or the shares after each; it is {schedule!r}")
    left, rounds = (1 - amount) / (1 - before), int(schedule)
    return [*(1 - (1 - before) * left ** (n / rounds) for n in range(1, rounds)), amount]


def _is_share(amount: object) -> bool:
    return isinstance(amount, Real) and not isinstance(amount, bool) and 0 < float(amount) < 1


def _refuse_once_only(rounds: int, batches: Batches | None, how: How) -> None:
    if rounds == 1:
        return
    if how.get("diagonal") is not None:
        raise ValueError("a diagonal= is that of one network: several rounds find it anew, from loss_fn and batches")
    if isinstance(batches, Iterator):
        raise ValueError("the first round would exhaust batches, an iterator: pass a list or a data loader")


def _result(chosen: Mapping[str, Place], steps: Sequence[float]) -> Pruned:
    kept = {name: place.mask for name, place in chosen.items()}
    sizes = sum(mask.numel() for mask in kept.values())
    shares = {name: 1 - float(mask.double().mean()) for name, mask in kept.items()}
    return Pruned(1 - sum(float(mask.double().sum()) for mask in kept.values()) / sizes, shares, tuple(steps))
