"""The template of all optimizers here: Adam with curvature in place of the squared gradient. It holds the only step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from .. import distributed
from ..columns.dial import Rank
from ..compiled import Step, compile_for
from ..graph import LOW_PRECISION
from . import amp, checkpoints, checks, leaps
from .arming import armed, suspended
from .shards import PLAIN, local, total
from .sources import Propagated, Source, with_rank
from .updates import Factors, Form, Formula, Slot, factors, forms_of, metric

CurvatureHook = Callable[["CurvatureScaled"], None]

_NO_SOURCE = (
    "CurvatureScaled computes no curvature: write p.curvature before step(), by hesscale.backward(loss) or an "
    "estimator, give it a source, or use a preset such as hesscale.AdaHesScale"
)


class CurvatureScaled(Optimizer):
    """Adam whose second moment is one of curvature. It reads ``p.curvature``, whoever has written it.

        m = EMA(g)     V = EMA(h²), h = p.curvature     p ← (1 − lr·weight_decay)·p − lr · clip(m̂ / (√V̂ + eps), ±bound)

    - ``every=k``: V is refreshed in each of the first k steps, to have an average, and from then on in every k-th;
      its bias correction counts refreshes.
    - ``scale``: how V averages: "rms" as above, "mean_abs" V = EMA(|h|) or "mean" V = EMA(h) with |V̂| + eps below.
    - ``eps_inside_root``: √(V̂ + eps), as in Algorithm 2 of Elsayed & Mahmood; their code has it outside.
    - ``bound``: no entry moves by more than lr·bound, however small its curvature is. None: the paper's algorithm.
    - ``trust_region=δ``: the updates u of all groups are scaled by min(1, √(2δ / Σ c u²)), c = √V.
    - ``source``: which pass ``backward``, ``attach`` and ``armed`` use to compute curvature (sources.py); ``rank``: how
      many columns it carries beside the diagonal, as in ``hesscale.backward``.
    - ``fused``: one call of C++, compiled when first needed; None: on a CPU, if it can be had. ``capturable``: nothing
      is read back to the host, so non-finite values are not looked for.

    Averages of parameters in half precision are kept in single precision, and so is the arithmetic.
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
        checks.refuse_bad_options(group, first=self.param_groups[0])
        self._is_sharded = distributed.watch_shards(p for group in self.param_groups for p in group["params"])

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
        if "_curvature_hooks" not in self.__dict__:
            self._start_afresh()
            self._is_sharded = distributed.watch_shards(p for group in self.param_groups for p in group["params"])

    def _start_afresh(self) -> None:
        # what lives between a backward pass and its step, and hooks: nothing that belongs into a checkpoint
        self._curvature_hooks: list[CurvatureHook] = []
        self._scaler: GradScaler | None = None
        self._is_unscaled = False
        self._has_warned = False  # of a leap

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Averages in single precision stay so; of Adam's and AdamW's state, V begins afresh."""
        with checkpoints.adopted(self):
            super().load_state_dict(state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler asks: it leaves unscaling to step, which unscales curvature as well.

        Others who ask (Lightning) refuse to clip the gradients of optimizers that unscale in their step; here they may.
        """
        self._scaler = amp.scaler_that_asks()
        return self._scaler is not None

    @property
    def curvature_due(self) -> bool:
        """Whether the next ``step`` refreshes averages of curvature, and so needs a pass that computes it."""
        return any(_is_due(group) for group in self.param_groups)

    def backward(self, loss: Tensor, *, retain_graph: bool = False, **options: Any) -> None:
        """Fills ``p.grad``, and ``p.curvature`` when it is due. Call it in place of ``loss.backward()``.

        ``options`` are those of the source.
        """
        source = self._known_source()
        if self.curvature_due:
            with suspended():
                source(loss, self._trainable(), retain_graph=retain_graph, **options)
        else:
            loss.backward(retain_graph=retain_graph)

    def attach(self, loss: Tensor, **options: Any) -> Tensor:
        """The same ``loss``; when curvature is due, a ``.backward()`` on it fills ``p.curvature`` too.

        As ``hesscale.attach``, with this optimizer's source and schedule; for sources that need no pass of their own.
        """
        source = self._known_source()
        return source.attach(loss, **options) if self.curvature_due else loss

    def armed(self, **options: Any) -> AbstractContextManager[None]:
        """Within it every ``backward`` of this thread that reaches these parameters fills ``p.curvature`` when due.

        For trainers that leave no line to change: ``with optimizer.armed(): trainer.train()``.
        """
        self._known_source()
        return armed(self, options)

    def compile(self, loss_fn: Callable[..., Any], model: nn.Module, **options: Any) -> Step:
        """``hesscale.compile(loss_fn, model)`` by this optimizer's method; without curvature where it is not due."""
        source = self._known_source()
        if not isinstance(source, Propagated):
            raise ValueError(f"only passes by hesscale.backward can be compiled, not {source}")
        return compile_for(self, loss_fn, model, method=source.name, rank=source.rank, **options)

    def _known_source(self) -> Source:
        if self.source is None:
            raise NotImplementedError(_NO_SOURCE)
        return self.source

    def _trainable(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as in torch, and curvature."""
        self._clear_curvature()
        super().zero_grad(set_to_none)

    def unscale_(self, scaler: GradScaler) -> None:
        """Does ``scaler.unscale_(self)`` for gradients and curvature: to look at unscaled curvature before the step."""
        scale = scaler.get_scale()
        scaler.unscale_(self)
        if scaler.is_enabled():
            curvatures = (getattr(p, "curvature", None) for group in self.param_groups for p in group["params"])
            amp.divide([local(h) for h in curvatures if h is not None], scale)
            self._is_unscaled = True

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
        # a GradScaler leaves its verdict here for as long as its step lasts
        overflowed = bool(getattr(self, "found_inf", False))
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            if not overflowed:
                self._step()
        self._clear_curvature()
        return loss

    def _step(self) -> None:
        if self.curvature_due:
            if not self._curvature_hooks and not self._is_sharded:
                checks.refuse_alone()
            for hook in self._curvature_hooks:
                hook(self)
        slots = [slot for group in self.param_groups for slot in self._slots(group)]
        if hasattr(self, "found_inf"):
            self._unscale(slots)
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
            m, v = state["exp_avg"], state["exp_curvature"]
            if type(p) not in PLAIN:
                p, g, h, m, v = local(p), local(g), local(h), local(m), local(v)
            if p.dtype in LOW_PRECISION:
                p, g, narrow = p.float(), g.float(), p
            found.append(Slot(place, formula, numbers, p, g, h, m, v, state, narrow))
        return found

    def _unscale(self, slots: Sequence[Slot]) -> None:
        """What a GradScaler leaves to the step."""
        curvatures = [slot.h for slot in slots if slot.h is not None]
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            amp.divide([*(slot.g for slot in slots), *curvatures], scale)
            for slot in slots:
                if slot.narrow is not None and slot.narrow.grad is not None:
                    slot.narrow.grad.copy_(slot.g)
        elif curvatures and not self._is_unscaled:
            if self._scaler is None:
                raise RuntimeError(amp.UNKNOWN_SCALE)
            amp.divide(curvatures, self._scaler.get_scale())

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

    def _clear_curvature(self) -> None:
        self._scaler, self._is_unscaled = None, False
        for group in self.param_groups:
            for p in group["params"]:
                p.curvature = None


def _move_within(radius: float, pairs: Sequence[tuple[Slot, Tensor]]) -> None:
    """p ← decay·p − min(1, √(2δ/T)) u  with  T = Σ c u² over all parameters."""
    if not pairs:
        return
    parts = [(metric(slot) * u * u).sum() for slot, u in pairs]
    length = total(parts, [slot.parameter for slot, _ in pairs])
    factor = (2 * radius / length).sqrt().clamp(max=1.0)
    for slot, u in pairs:
        if slot.formula.weight_decay:
            slot.p.mul_(slot.factors.decay)
        slot.p.sub_(u * factor.to(u.device))


def _begin(state: dict[str, Any], p: Tensor, *, capturable: bool) -> None:
    wide = torch.float32 if p.dtype in LOW_PRECISION else p.dtype
    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if capturable else "cpu")
    state["refreshes"] = 0
    for name in ("exp_avg", "exp_curvature"):
        state[name] = torch.zeros_like(p, dtype=wide, memory_format=torch.preserve_format, requires_grad=False)


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
