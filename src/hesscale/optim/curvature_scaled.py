"""The template of all optimizers here: Adam with curvature in place of the squared gradient. It has the update."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..columns.dial import Rank
from ..graph import LOW_PRECISION, wide
from . import checkpoints, checks, leaps
from .reading import ReadsCurvature
from .shards import PLAIN, local
from .sources import Source, with_rank
from .trust import shrinkage
from .updates import Factors, Form, Formula, Number, Slot, factors, forms_of, metric


class CurvatureScaled(ReadsCurvature):
    """Adam whose second moment is one of curvature. It reads ``p.curvature``, whoever has written it.

        m = EMA(g)     V = EMA(h²), h = p.curvature     p ← (1 − lr·weight_decay)·p − lr · clip(m̂ / (√V̂ + eps), ±bound)

    - ``every=k``: V is refreshed in each of the first k steps, to have an average, and from then on in every k-th;
      its bias correction counts refreshes.
    - ``scale``: "rms" as above, "mean_abs" ``V = EMA(|h|)`` or "mean" ``V = EMA(h)`` with ``|V̂| + eps`` below.
    - ``eps_inside_root``: √(V̂ + eps), as in Algorithm 2 of Elsayed & Mahmood; their code has it outside.
    - ``bound``: no entry moves by more than lr·bound, however small its curvature is. None: the paper's algorithm.
    - ``trust_region=δ``: the updates u of all groups are scaled by min(1, √(2δ / Σ c u²)), c = √V.
    - ``source``: which pass ``backward``, ``attach`` and ``armed`` use to compute curvature (sources.py); ``rank``: how
      many columns it carries beside the diagonal, as in ``hesscale.backward``.
    - ``fused``: one call of C++, compiled when first needed; None: on a CPU, if it can be had. ``capturable``: nothing
      is read back to the host, so non-finite values are not looked for.

    Averages of parameters in half precision are kept in single precision, and so is the arithmetic.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> source = hesscale.optim.Propagated("hesscale_gn")
    >>> optimizer = hesscale.optim.CurvatureScaled([w], lr=0.1, source=source)
    >>> optimizer.backward(w.square().sum())
    >>> optimizer.step()
    >>> w
    tensor([0.9000, 1.9000], requires_grad=True)
    """

    SOURCE: ClassVar[Source | None] = None

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
        bound: float | None = 1.0,
        trust_region: float | None = None,
        source: Source | None = None,
        rank: Rank = 0,
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
            "bound": bound,
            "trust_region": trust_region,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
            "steps": 0,
        }
        source = self.SOURCE if source is None else source
        self.source = with_rank(source, rank) if rank else source
        super().__init__(params, defaults)
        self._start_afresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch; its step count is that of the others."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["steps"] = self.param_groups[0]["steps"]
        try:
            checks.refuse_bad_options(group, first=self.param_groups[0])
        except ValueError:
            self.param_groups.pop()
            raise
        self._watch_shards()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "source": self.source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("source", self.SOURCE)
        for group in self.param_groups:
            if "eps_inside_root" in group:  # ours, of a time when nothing was bounded
                group.setdefault("bound", None)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for p in group["params"]:
                if self.state.get(p):
                    self.state[p] = checkpoints.today(self.state[p], group["scale"])
                    self.state[p]["step"] = _counter(p, self.state[p]["step"], capturable=group["capturable"])
        if "_curvature_hooks" not in self.__dict__:
            self._start_afresh()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Averages in single precision stay so; of Adam's and AdamW's state, V begins afresh."""
        with checkpoints.adopted(self):
            super().load_state_dict(state_dict)

    @property
    def curvature_due(self) -> bool:
        """Whether the next ``step`` refreshes averages of curvature, and so needs a pass that computes it."""
        return any(_is_due(group) for group in self.param_groups)

    def _update(self) -> None:
        self._run_curvature_hooks()
        slots = [slot for group in self.param_groups for slot in self._slots(group)]
        if hasattr(self, "found_inf"):
            self._unscale_slots(slots)
        forms = forms_of(slots)
        if self._is_usable(forms):
            if self._has_warned or not _may_leap(self.param_groups):
                self._move(forms)
            else:
                self._move_and_watch(forms, slots)
            self._count(slots)

    def _slots(self, group: dict[str, Any]) -> list[Slot]:
        formula, is_due, capturable = _formula(group), _is_due(group), group["capturable"]
        known: dict[Any, Factors] = {}
        found: list[Slot] = []
        for index, p in enumerate(group["params"]):
            g, place, narrow = p.grad, (group, index), None
            if g is None:
                continue
            h = checks.fresh_curvature(p, g, place, is_due=is_due, source=self.source)
            state = self.state[p]
            if not state:
                _begin(state, p, capturable=capturable)
            # 1 − β₂ᵗ needs more digits than float32 has
            steps = state["step"].double() + 1 if capturable else state["step"].item() + 1
            refreshes = steps if capturable else state["refreshes"] + is_due
            if not is_due and not refreshes:
                continue  # it came into play between two refreshes, and waits for its first curvature
            numbers = None if capturable else known.get((steps, refreshes))
            if numbers is None:
                numbers = known[steps, refreshes] = factors(formula, steps, refreshes)
            m, v = state["exp_avg"], state["mean_curvature"]
            if type(p) not in PLAIN:
                p, g, h, m, v = local(p), local(g), local(h), local(m), local(v)
            if p.dtype in LOW_PRECISION:
                p, g, narrow = p.float(), g.float(), p
            found.append(Slot(place, formula, numbers, p, g, h, m, v, state, narrow))
        return found

    def _unscale_slots(self, slots: Sequence[Slot]) -> None:
        self._unscale([slot.g for slot in slots], [slot.h for slot in slots if slot.h is not None])
        for slot in slots:
            if slot.narrow is not None and slot.narrow.grad is not None:
                slot.narrow.grad.copy_(slot.g)

    def _is_usable(self, forms: Sequence[Form]) -> bool:
        # nobody looks at what is captured
        looked_at = [form for form in forms if not isinstance(form.slots[0].factors.correction, Tensor)]
        seen = [pair for form in looked_at for pair in zip(form.slots, form.tops(), strict=True)]
        bad = checks.non_finite(seen)
        if bad and not hasattr(self, "found_inf"):
            raise RuntimeError(f"{bad}; nothing was changed")
        if bad:
            warnings.warn(f"{bad}, under the loss scale: step skipped; use a lower scale", stacklevel=6)
        return not bad

    def _move_and_watch(self, forms: Sequence[Form], slots: Sequence[Slot]) -> None:
        watched = leaps.watched(slots)
        before = leaps.norms(watched)
        self._move(forms)
        leap = leaps.first_leap(watched, before)
        if leap:
            self._has_warned = True
            warnings.warn(leap, stacklevel=5)

    def _move(self, forms: Sequence[Form]) -> None:
        radius = self.param_groups[0]["trust_region"]
        if radius is None:
            for form in forms:
                form.move()
        else:
            _move_within(radius, [pair for form in forms for pair in zip(form.slots, form.directions(), strict=True)])

    def _count(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.narrow is not None:
                slot.narrow.copy_(slot.p)
            slot.state["refreshes"] += slot.h is not None
        if slots:
            torch._foreach_add_([slot.state["step"] for slot in slots], 1)
        for group in self.param_groups:
            group["steps"] += 1


def _move_within(radius: float, pairs: Sequence[tuple[Slot, Tensor]]) -> None:
    """p ← decay·p − min(1, √(2δ/T)) u  with  T = Σ c u² over all parameters."""
    if not pairs:
        return
    factor = shrinkage(radius, [(metric(slot), u, slot.parameter) for slot, u in pairs])
    for slot, u in pairs:
        if slot.formula.weight_decay:
            slot.p.mul_(slot.factors.decay)
        slot.p.sub_(u * factor.to(u.device))


def _begin(state: dict[str, Any], p: Tensor, *, capturable: bool) -> None:
    state["step"] = _counter(p, 0.0, capturable=capturable)
    state["refreshes"] = 0
    for name in ("exp_avg", "mean_curvature"):
        state[name] = torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False)


def _counter(p: Tensor, steps: Number, *, capturable: bool) -> Tensor:
    return torch.as_tensor(steps, dtype=torch.float32, device=p.device if capturable else "cpu")


def _is_due(group: Mapping[str, Any]) -> bool:
    # one curvature is a poor average: entries that happen to be near zero in it would take huge steps until the next
    steps, every = group["steps"], group["every"]
    due: bool = steps < every or steps % every == 0
    return due


def _may_leap(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether this is a step to watch, and some group has no bound that makes it needless."""
    steps = groups[0]["steps"]
    if steps >= leaps.FIRST and steps % leaps.FIRST:
        return False
    bounds = [group["bound"] for group in groups]
    return None in bounds or max(bounds) > leaps.FACTOR


def _formula(group: Mapping[str, Any]) -> Formula:
    lr = group["lr"]
    on_device = group["capturable"] or group["differentiable"]
    beta1, beta2 = group["betas"]
    same = {name: group[name] for name in ("eps", "weight_decay", "scale", "eps_inside_root", "bound", "maximize")}
    return Formula(lr=lr if on_device else float(lr), beta1=beta1, beta2=beta2, form=_form(group), **same)


def _form(group: Mapping[str, Any]) -> str:
    if group["fused"]:
        return "fused"
    if group["foreach"] is not None or group["differentiable"]:
        return "foreach" if group["foreach"] else "loop"
    if group["params"] and not group["params"][0].is_cpu:
        return "foreach"
    return "default" if group["fused"] is None else "loop"
