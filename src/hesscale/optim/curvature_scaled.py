"""The template of all optimizers here: Adam with curvature in place of the squared gradient. It holds the only step."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..outer import written_out
from . import checks, native
from .amp import LossScale, divide
from .borrowed import update_by_borrowed
from .kernel import directions_by_kernel, update_by_kernel
from .native import Batch
from .shards import is_sharded, local, total
from .updates import (
    Floor,
    Formula,
    Slot,
    directions_by_foreach,
    directions_by_loop,
    metric,
    update_by_foreach,
    update_by_loop,
)

IMPLEMENTATIONS = {
    "borrowed": (update_by_borrowed, directions_by_loop),
    "loop": (update_by_loop, directions_by_loop),
    "foreach": (update_by_foreach, directions_by_foreach),
    "fused": (update_by_kernel, directions_by_kernel),
}

CurvatureHook = Callable[["CurvatureScaled"], None]


class CurvatureScaled(Optimizer):
    """Adam whose second moment is one of curvature. It reads ``p.curvature``, whoever has written it.

        m = EMA(g)      V = EMA(h²), h = p.curvature      p ← (1 − lr·weight_decay)·p − lr · m̂ / (√V̂ + eps)

    - ``every=k``: V is refreshed in each of the first k steps, to have an average, and from then on in every k-th;
      its bias correction counts refreshes.
    - ``scale``: how V averages: "rms" as above, "mean_abs" V = EMA(|h|) or "mean" V = EMA(h) with |V̂| + eps below.
    - ``eps_inside_root``: √(V̂ + eps), as in Algorithm 2 of Elsayed & Mahmood; their code has it outside.
    - ``trust_region=δ``: the updates u of all groups are scaled by min(1, √(2δ / Σ c u²)), c = √V.
    - ``fused``: one kernel, compiled when first needed. ``capturable``: nothing is read back to the host, so
      non-finite values are not looked for.
    """

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling to step, which unscales curvature as well

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        every: int = 1,
        scale: str = "rms",
        eps_inside_root: bool = False,
        trust_region: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "every": every,
            "scale": scale,
            "eps_inside_root": eps_inside_root,
            "trust_region": trust_region,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
            "steps": 0,
        }
        super().__init__(params, defaults)
        self._start_afresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch; its step count is that of the others."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["steps"] = self.param_groups[0]["steps"]
        checks.refuse_bad_options(group, first=self.param_groups[0])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        if "_curvature_hooks" not in self.__dict__:
            self._start_afresh()
        self._floors.clear()

    def _start_afresh(self) -> None:
        # what lives between a backward pass and its step, and hooks: nothing that belongs into a checkpoint
        self._curvature_hooks: list[CurvatureHook] = []
        self._loss_scale = LossScale()
        self._floors: defaultdict[int, Floor] = defaultdict(Floor)  # by id: hashing a tensor takes long

    @property
    def curvature_due(self) -> bool:
        """Whether the next ``step`` refreshes averages of curvature, and so needs a pass that computes it."""
        return any(_is_due(group) for group in self.param_groups)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Fills ``p.grad``, and ``p.curvature`` when it is due. Call it in place of ``loss.backward()``.

        The template itself knows no source of curvature: presets do.
        """
        raise NotImplementedError(
            "CurvatureScaled computes no curvature: write p.curvature before step(), by hesscale.backward(loss) or an "
            "estimator, or use a preset such as hesscale.AdaHesScale"
        )

    def _backward(self, loss: Tensor, retain_graph: bool, curvature_pass: Callable[[], None]) -> None:
        if self.curvature_due:
            self._loss_scale.note(loss)
            curvature_pass()
        else:
            loss.backward(retain_graph=retain_graph)

    @property
    def _takes_factors(self) -> bool:
        """Whether curvature of rank one need not be written out: nobody but ``step`` is known to look at it."""
        return not self._curvature_hooks

    def _trainable(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as in torch, and curvature."""
        super().zero_grad(set_to_none)
        self._clear_curvature()

    def unscale_(self, scaler: torch.amp.GradScaler) -> None:
        """Does ``scaler.unscale_(self)`` for gradients and curvature, e.g. to clip gradients before ``scaler.step``."""
        scale = scaler.get_scale()
        scaler.unscale_(self)
        if scaler.is_enabled():
            curvatures = (getattr(p, "curvature", None) for group in self.param_groups for p in group["params"])
            divide([local(h) for h in curvatures if h is not None], scale)
            self._loss_scale.resolve()

    def register_curvature_hook(self, hook: CurvatureHook) -> None:
        """Calls ``hook(optimizer)`` in each step that uses curvature, before it does: to average it over processes.

        As with torch's own hooks, copies and checkpoints of the optimizer do not carry it.
        """
        self._curvature_hooks.append(hook)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves every parameter that has a gradient, and consumes ``p.curvature``. Returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            if not self._gradients_overflowed():
                self._step()
        self._clear_curvature()
        return loss

    def _step(self) -> None:
        if self.curvature_due:
            checks.warn_if_alone(has_hooks=bool(self._curvature_hooks))
            for hook in self._curvature_hooks:
                hook(self)
        slots = [slot for group in self.param_groups for slot in self._slots(group)]
        if hasattr(self, "found_inf"):
            slots = [*map(_written_out, slots)]
            self._unscale(slots)
        batches, rest = native.gathered(slots)
        rest = [slot if slot.formula.implementation == "borrowed" else _written_out(slot) for slot in rest]
        slots = [*chain.from_iterable(batch.slots for batch in batches), *rest]
        suspects = _suspects(batches, rest)
        if self._is_usable([slot for slot in slots if id(slot) in suspects] if suspects else []):
            self._update(batches, [_by_loop(s) if id(s) in suspects else s for s in rest] if suspects else rest)
            self._count(slots, rest)

    def _slots(self, group: dict[str, Any]) -> list[Slot]:
        formula, is_due, capturable = _formula(group), _is_due(group), group["capturable"]
        found = []
        for index, p in enumerate(group["params"]):
            g, place = p.grad, (group, index)
            if g is None:
                continue
            h = checks.fresh_curvature(p, g, place, is_due=is_due)
            state = self.state[p]
            if not state:
                _begin(state, p, capturable=capturable)
            # 1 − β₂ᵗ needs more digits than float32 has
            steps = state["step"].double() + 1 if capturable else state["step"].item() + 1
            refreshes = steps if capturable else state["refreshes"] + is_due
            m, v, floor = state["exp_avg"], state["exp_curvature"], self._floors[id(p)]
            if is_sharded(p):
                p, g, h, m, v = local(p), local(g), local(h), local(m), local(v)
            # parameters that came into play between two refreshes wait for their first curvature
            if is_due or refreshes:
                found.append(Slot(place, formula, p, g, h, m, v, steps, refreshes, state, floor))
        return found

    def _gradients_overflowed(self) -> bool:
        # a GradScaler leaves its verdict here for as long as its step lasts
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    def _unscale(self, slots: Sequence[Slot]) -> None:
        """What a GradScaler leaves to the step."""
        curvatures = [slot.h for slot in slots if slot.h is not None]
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            divide([*(slot.g for slot in slots), *curvatures], scale)
        elif curvatures:
            divide(curvatures, self._loss_scale.left_on_curvature())

    def _is_usable(self, suspects: Sequence[Slot]) -> bool:
        bad = checks.non_finite(suspects) if suspects else []
        if bad and not hasattr(self, "found_inf"):
            raise RuntimeError(f"{bad[0]} is not finite (and {len(bad) - 1} more); nothing was changed")
        if bad:
            warnings.warn(f"{bad[0]} overflowed under the loss scale: step skipped; use a lower scale", stacklevel=4)
        return not bad

    def _update(self, batches: Sequence[Batch], rest: Sequence[Slot]) -> None:
        radius = self.param_groups[0]["trust_region"]
        pairs: list[tuple[Slot, Tensor]] = []
        for batch in batches:
            if radius is None:
                native.update(batch)
            else:
                pairs += zip(batch.slots, native.directions(batch), strict=True)
        chosen_by: dict[str, list[Slot]] = {}
        for slot in rest:
            chosen_by.setdefault(slot.formula.implementation, []).append(slot)
        for name, chosen in chosen_by.items():
            update, directions = IMPLEMENTATIONS[name]
            if radius is None:
                update(chosen)
            else:
                pairs += zip(chosen, directions(chosen), strict=True)
        if pairs:
            _move_within(radius, pairs)

    def _count(self, slots: Sequence[Slot], rest: Sequence[Slot]) -> None:
        if rest:  # native.cpp has counted its own
            # as a tensor where it can be one: of a number, torch makes a tensor for each of them
            one = 1 if self.defaults["capturable"] else torch.ones(())
            torch._foreach_add_([slot.state["step"] for slot in rest], one)
        for slot in slots:
            slot.state["refreshes"] += slot.h is not None
        for group in self.param_groups:
            group["steps"] += 1

    def _clear_curvature(self) -> None:
        self._loss_scale.forget()
        for group in self.param_groups:
            for p in group["params"]:
                p.curvature = None


def _suspects(batches: Sequence[Batch], rest: Sequence[Slot]) -> set[int]:
    """The ids of slots that deserve a closer look; nobody looks at those that are captured."""
    found = checks.suspicious([slot for slot in rest if not isinstance(slot.steps, Tensor)]) if rest else []
    for batch in batches:
        found += native.suspicious(batch)
    return {*map(id, found)}


def _written_out(slot: Slot) -> Slot:
    """The slot with its curvature as a tensor like any other."""
    whole = None if slot.h is None else written_out(slot.h)
    return slot if whole is slot.h else slot._replace(h=whole)


def _by_loop(slot: Slot) -> Slot:
    """The slot, to be updated by the implementation that knows no limits."""
    is_borrowed = slot.formula.implementation == "borrowed"
    return slot._replace(formula=slot.formula._replace(implementation="loop")) if is_borrowed else slot


def _move_within(radius: float, pairs: Sequence[tuple[Slot, Tensor]]) -> None:
    """p ← decay·p − min(1, √(2δ/T)) u  with  T = Σ c u² over all parameters."""
    parts = [(metric(slot) * u * u).sum() for slot, u in pairs]
    length = total(parts, [slot.parameter for slot, _ in pairs])
    factor = (2 * radius / length).sqrt().clamp(max=1.0)
    for slot, u in pairs:
        if slot.formula.weight_decay:
            slot.p.mul_(slot.decay)
        slot.p.sub_(u * factor.to(u.device))


def _begin(state: dict[str, Any], p: Tensor, *, capturable: bool) -> None:
    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if capturable else "cpu")
    state["refreshes"] = 0
    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format, requires_grad=False)
    state["exp_curvature"] = torch.zeros_like(p, memory_format=torch.preserve_format, requires_grad=False)


def _is_due(group: Mapping[str, Any]) -> bool:
    # one curvature is a poor average: entries that happen to be near zero in it would take huge steps until the next
    steps, every = group["steps"], group["every"]
    due: bool = steps < every or steps % every == 0
    return due


def _formula(group: Mapping[str, Any]) -> Formula:
    lr = group["lr"]
    on_device = group["capturable"] or group["differentiable"]
    beta1, beta2 = group["betas"]
    return Formula(
        lr=lr if on_device else float(lr),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        scale=group["scale"],
        eps_inside_root=group["eps_inside_root"],
        maximize=group["maximize"],
        implementation=_implementation(group),
    )


def _implementation(group: Mapping[str, Any]) -> str:
    if group["fused"]:
        return "fused"
    if group["foreach"] is None and not group["differentiable"]:
        return "foreach" if all(p.device.type == "cuda" for p in group["params"]) else "borrowed"
    return "foreach" if group["foreach"] else "loop"
