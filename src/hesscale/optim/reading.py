"""What all optimizers that read ``p.curvature`` have in common: they compute it in backward, and consume it in step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .. import distributed, leaves
from . import amp, checks
from .arming import armed, suspended
from .shards import local
from .sources import Source

CurvatureHook = Callable[["ReadsCurvature"], None]

_NO_SOURCE = (
    "{name} computes no curvature: write p.curvature before step(), by hesscale.backward(loss) or an estimator, give "
    "it a source, or use a preset such as hesscale.AdaHesScale"
)


class ReadsCurvature(Optimizer):
    """An optimizer whose step reads ``p.curvature`` when ``curvature_due`` says so; ``source`` computes it."""

    source: Source | None

    @property
    def curvature_due(self) -> bool:
        """Whether the next ``step`` refreshes averages of curvature, and so needs a pass that computes it."""
        raise NotImplementedError

    def _update(self) -> None:
        """One step, with gradients and curvature in place."""
        raise NotImplementedError

    def _start_afresh(self) -> None:
        # what lives between a backward pass and its step, and hooks: nothing that belongs into a checkpoint
        self._curvature_hooks: list[CurvatureHook] = []
        self._scaler: GradScaler | None = None
        self._is_unscaled = False
        self._has_warned = False  # of a leap
        self._watch_shards()

    def _watch_shards(self) -> None:
        self._is_sharded = distributed.watch_shards(p for group in self.param_groups for p in group["params"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler asks: it leaves unscaling to step, which unscales curvature as well.

        Others who ask (Lightning) refuse to clip the gradients of optimizers that unscale in their step; here they may.
        """
        self._scaler = amp.scaler_that_asks()
        return self._scaler is not None

    def backward(self, loss: Tensor, *, retain_graph: bool = False, **options: Any) -> None:
        """Fills ``p.grad``, and ``p.curvature`` when it is due. Call it in place of ``loss.backward()``.

        ``options`` are those of the source.
        """
        source = self._known_source()
        if self.curvature_due:
            self.drop_cleared()
            with suspended():
                source(loss, self._trainable(), retain_graph=retain_graph, **options)
        else:
            loss.backward(retain_graph=retain_graph)

    def attach(self, loss: Tensor, **options: Any) -> Tensor:
        """The same ``loss``; when curvature is due, a ``.backward()`` on it fills ``p.curvature`` too.

        As ``hesscale.attach``, with this optimizer's source and schedule; for sources that need no pass of their own.
        """
        source = self._known_source()
        if not self.curvature_due:
            return loss
        self.drop_cleared()
        return source.attach(loss, **options)

    def armed(self, **options: Any) -> AbstractContextManager[None]:
        """Within it every ``backward`` of this thread that reaches these parameters fills ``p.curvature`` when due.

        For trainers that leave no line to change: ``with optimizer.armed(): trainer.train()``.
        """
        self._known_source()
        return armed(self, options)

    def _known_source(self) -> Source:
        if self.source is None:
            raise NotImplementedError(_NO_SOURCE.format(name=type(self).__name__))
        return self.source

    def drop_cleared(self) -> None:
        """Drops curvature of cleared gradients also where the coming pass does not reach; FSDP2 has its own way."""
        if not self._is_sharded:
            for p in self._trainable():
                leaves.drop_if_cleared(p)

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
                self._update()
        self._clear_curvature()
        return loss

    def _run_curvature_hooks(self) -> None:
        if self.curvature_due:
            if not self._curvature_hooks and not self._is_sharded:
                checks.refuse_alone(self)
            for hook in self._curvature_hooks:
                hook(self)

    def _unscale(self, gradients: Sequence[Tensor], curvatures: Sequence[Tensor]) -> None:
        """What a GradScaler leaves to the step."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            amp.divide([*gradients, *curvatures], scale)
        elif curvatures and not self._is_unscaled:
            if self._scaler is None:
                raise RuntimeError(amp.UNKNOWN_SCALE)
            amp.divide(curvatures, self._scaler.get_scale())

    def _clear_curvature(self) -> None:
        self._scaler, self._is_unscaled = None, False
        for group in self.param_groups:
            for p in group["params"]:
                p.curvature = None
