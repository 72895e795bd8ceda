"""The one convention of all applications: a diagonal of ``(model, loss_fn, batches)``, or one that is brought along."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypedDict, Unpack, final

import torch
from torch import Tensor, nn

from ..columns.dial import Rank
from ..estimators import estimate_over
from ..estimators.api import Size, inputs_and_targets, size_of
from ..estimators.problem import LossFunction, Problem, chosen_parameters, without_traces
from ..graph import wide

Batches = Iterable[tuple[Any, Any]]
"""Pairs of inputs and targets: a data loader, or a list of them."""
Progress = bool | Callable[[int], None]
"""True: a line on stderr that counts batches; or a function that is told how many are done."""


class How(TypedDict, total=False):
    """How a diagonal is found: options that every application hands on to ``diagonal_over``."""

    method: str  # any name that hesscale.estimate knows; "hesscale" if not given
    rank: Rank
    samples: int
    generator: torch.Generator | None
    params: Sequence[str] | None  # names of the parameters that matter, all that require grad if None
    diagonal: Mapping[str, Tensor] | None  # one computed elsewhere, by parameter name, instead of all this
    size: Size | None  # how many examples a batch has, if that is not the length of its targets
    progress: Progress


def diagonal_over(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    batches: Batches | None = None,
    *,
    method: str = "hesscale",
    rank: Rank = 0,
    samples: int = 1,
    generator: torch.Generator | None = None,
    params: Sequence[str] | None = None,
    diagonal: Mapping[str, Tensor] | None = None,
    size: Size | None = None,
    progress: Progress = False,
) -> dict[str, Tensor]:
    """The diagonal of the mean loss over all batches, by parameter name; or the given one, if it fits the model.

    ``loss_fn`` must average over examples, and batches count by their number of examples. A loss that averages over
    something else needs ``size``: with ``ignore_index=-100``, ``size=lambda batch: (batch[1] != -100).sum()``.

    Batches are moved to the device of the model's parameters. Nothing of the model changes, ``.grad`` and
    ``.curvature`` included.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> batches = [(torch.ones(1, 2), torch.zeros(1, 1)), (2 * torch.ones(1, 2), torch.zeros(1, 1))]
    >>> hesscale.applications.diagonal_over(model, F.mse_loss, batches)
    {'weight': tensor([[5., 5.]])}
    """
    chosen = chosen_parameters(model, params)
    if diagonal is not None:
        return _fitting(diagonal, chosen)
    if loss_fn is None or batches is None:
        raise TypeError("a diagonal is found with loss_fn and batches: pass both, or diagonal=")
    device = next(iter(chosen.values())).device
    found = estimate_over(
        method,
        model,
        loss_fn,
        (on_device(batch, device) for batch in batches),
        params=[*chosen],
        samples=samples,
        rank=rank,
        generator=generator,
        size=size,
        progress=reporter(batches, progress),
    )
    return finite(found, "the diagonal")


def derivatives_over(
    model: nn.Module, loss_fn: LossFunction | None = None, batches: Batches | None = None, **how: Unpack[How]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient and diagonal of the mean loss over all batches, which are gone through once: an iterator will do."""
    if loss_fn is None or batches is None:
        raise TypeError("a gradient is found with loss_fn and batches: pass both")
    chosen = chosen_parameters(model, how.get("params"))
    mean = _MeanGradient(model, loss_fn, chosen, how.get("size"))
    how["progress"] = report = reporter(batches, how.get("progress", False))
    seen = mean.passing(batches)
    if how.get("diagonal") is not None:
        for done, _ in enumerate(seen, start=1):
            report(done)
    diagonal = diagonal_over(model, loss_fn, seen, **how)
    return finite(mean.found(), "the gradient"), diagonal


@final
class _MeanGradient:
    """The gradient of the mean loss over batches that somebody else goes through."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, chosen: Mapping[str, Tensor], size: Size | None
    ) -> None:
        self._model, self._loss_fn, self._chosen, self._size = model, loss_fn, chosen, size
        self._totals = {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in chosen.items()}
        self._count = 0.0

    def passing(self, batches: Batches) -> Iterator[tuple[Any, Any]]:
        """The same batches, each counted before it is handed on."""
        device = next(iter(self._chosen.values())).device
        for batch in batches:
            moved = on_device(batch, device)
            examples = size_of(moved, self._size)
            if examples:
                self._add(*inputs_and_targets(moved), examples)
            yield moved

    def _add(self, inputs: Any, targets: Any, examples: float) -> None:
        problem = Problem(self._model, self._loss_fn, inputs, targets, self._chosen, 1, torch.Generator())
        with without_traces(self._model):
            loss = problem.loss(problem.outputs())
            gradients = torch.autograd.grad(loss, problem.tensors, allow_unused=True)
        self._count += examples
        for total, gradient in zip(self._totals.values(), gradients, strict=True):
            if gradient is not None:
                total.add_(gradient, alpha=examples)

    def found(self) -> dict[str, Tensor]:
        if not self._count:
            raise ValueError("the loader gave no examples")
        return {name: total / self._count for name, total in self._totals.items()}


def finite(found: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """The same, unless an entry is inf or nan."""
    bad = [name for name, value in found.items() if not torch.isfinite(value).all()]
    if bad:
        raise ValueError(
            f"{what} is not finite for {', '.join(bad[:3])}{' and others' if bad[3:] else ''}: look for inf or nan in "
            "the batches and in the model's parameters"
        )
    return found


def on_device(value: Any, device: torch.device) -> Any:
    """The same with all its tensors on a device, however deep in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: on_device(inner, device) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        moved = (on_device(inner, device) for inner in value)
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


def _fitting(given: Mapping[str, Tensor], chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of the chosen parameters, each of its shape and on its device, in float32 at least."""
    for name, p in chosen.items():
        if name not in given:
            raise ValueError(f"this diagonal has no entry for {name}: it belongs to another model")
        if given[name].shape != p.shape:
            raise ValueError(
                f"this diagonal has shape {tuple(given[name].shape)} for {name}, whose shape is {tuple(p.shape)}: it "
                "belongs to another model"
            )
    return finite(
        {name: given[name].detach().to(p.device, wide(p.dtype)) for name, p in chosen.items()}, "the diagonal"
    )


def reporter(batches: Batches, progress: Progress) -> Callable[[int], None]:
    """What is told how many batches are done."""
    if callable(progress):
        return progress
    if not progress:
        return lambda done: None
    last = len(batches) if isinstance(batches, Sized) else None
    total = "" if last is None else f"/{last}"

    def report(done: int) -> None:
        sys.stderr.write(f"\rcurvature: {done}{total} batches" + ("\n" if done == last else ""))
        sys.stderr.flush()

    return report
