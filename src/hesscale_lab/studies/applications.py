"""What the studies of applications share: diagonals by name, images, a training and its network, an accuracy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hesscale.applications import diagonal_over

from ..runs import load_state, save_state
from ..tasks.task import Labelled, Task
from . import stacked_mlp

Net = TypeVar("Net", bound=nn.Module)
Batches = Sequence[tuple[Tensor, Tensor]]
Diagonal = Mapping[str, Tensor]
"""By parameter name, of the mean cross-entropy."""
Compute = Callable[[nn.Module, Batches, torch.Generator], Diagonal]

_AT_ONCE = 50
"""How many examples have their own gradients in memory."""


def _ours(**options: Any) -> Compute:
    return lambda model, batches, generator: diagonal_over(
        model, F.cross_entropy, batches, generator=generator, **options
    )


def ones(model: nn.Module, batches: Batches, generator: torch.Generator) -> Diagonal:
    """1 everywhere: saliencies are then ½w², and a penalty is the plain distance (L2)."""
    return {name: torch.ones_like(p) for name, p in model.named_parameters()}


def empirical_fisher(model: nn.Module, batches: Batches, generator: torch.Generator) -> Diagonal:
    """The mean over examples of the squared gradient of each: E[g²], not the square of a batch's mean."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, dict(params), x.unsqueeze(0)), y.unsqueeze(0))

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    totals = {name: torch.zeros_like(p) for name, p in params.items()}
    for x, y in _small(batches):
        for name, gradients in each(params, x, y).items():
            totals[name] += gradients.square().sum(0)
    count = sum(len(y) for _, y in batches)
    return {name: total / count for name, total in totals.items()}


def exact(model: nn.Module, batches: Batches, generator: torch.Generator) -> Diagonal:
    """The diagonal of the Hessian of an MLP, from full Hessians at the units of each example."""
    if not isinstance(model, nn.Sequential) or not stacked_mlp.is_mlp(model):
        raise ValueError("the exact diagonal is cheap enough for MLPs only")
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in _small(batches):
        for total, each in zip(totals, stacked_mlp.exact(stacked_mlp.stack(model, x, y)), strict=True):
            total += each.sum(0)
    count = sum(len(y) for _, y in batches)
    return {name: total / count for (name, _), total in zip(model.named_parameters(), totals, strict=True)}


def _small(batches: Batches) -> list[tuple[Tensor, Tensor]]:
    return [pair for x, y in batches for pair in zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True)]


DIAGONALS: Mapping[str, Compute] = {
    "ones": ones,
    "g² per example": empirical_fisher,
    "HesScale": _ours(),
    "HesScaleGN": _ours(method="hesscale_gn"),
    "HesScale rank=1": _ours(rank=1),
    "HesScale rank=3": _ours(rank=3),
    "GGN-MC": _ours(method="ggn_mc"),
    "exact": exact,
}


@functools.lru_cache(maxsize=1)
def images_of(task: Task, data: Path | None) -> tuple[Labelled, Labelled]:
    """Training and test images of a task, read once for all cells of a run."""
    return task.load(data)


def train(model: nn.Module, batches: Iterable[Labelled], penalty: Callable[[], Tensor] | None = None) -> None:
    """Trains in place with a new Adam, once through the batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss if penalty is None else loss + penalty()).backward()
        optimizer.step()


def kept(path: Path, model: Net, fit: Callable[[Net], None]) -> Net:
    """The model as the file has it; without a file, the model is trained and written there."""
    if (state := load_state(path)) is not None:
        model.load_state_dict(state)
    else:
        fit(model)
        save_state(path, model.state_dict())
    return model


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    """The share of right answers."""
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return right / sum(len(y) for _, y in batches)
