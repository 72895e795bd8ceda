"""The table of small problems that every estimator is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hesscale.rules import RULES


@dataclass(frozen=True)
class Case:
    """A model, its loss and a batch, all in float64."""

    name: str
    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    batch: tuple[Any, Any]
    needs: tuple[str, ...] = ()  # rules for the propagated estimators

    @property
    def has_rules(self) -> bool:
        return all(node in RULES for node in self.needs)

    def first(self) -> Case:
        """The same with the first example only."""
        inputs, targets = self.batch
        return replace(self, batch=(inputs[:1], targets[:1]))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x + torch.tanh(self.inner(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.outer = nn.GRU(3, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.cell(x)[0][:, -1])


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, activation="gelu")
    return nn.Sequential(nn.Embedding(5, 4), layer, nn.Flatten(), nn.Linear(12, 3))


def cnn(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), activation(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2), activation(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 3),
    )  # fmt: skip


def mlp(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 4), activation(), nn.Linear(4, 3))


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 3))


def case(name: str, make: Callable[[], nn.Module], inputs: Tensor, loss_fn: Any = F.cross_entropy, **more: Any) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make().double()
        labels = torch.randint(3, (len(inputs),))
        values = torch.randn(len(inputs), 3, dtype=torch.float64)
    targets = {F.mse_loss: values, F.binary_cross_entropy_with_logits: values.sigmoid()}.get(loss_fn, labels)
    return Case(name, model, loss_fn, (inputs, targets), **more)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)


TOKENS = torch.tensor([[0, 1, 4], [2, 2, 3]])
CASES = [
    case("mlp", mlp, numbers(5, 3)),
    case("mlp-mse", mlp, numbers(5, 3), F.mse_loss),
    case("mlp-bce", mlp, numbers(5, 3), F.binary_cross_entropy_with_logits),
    case("mlp-relu", lambda: mlp(nn.ReLU), numbers(5, 3)),
    case("cnn", cnn, numbers(3, 2, 6, 6)),
    case("cnn-relu", lambda: cnn(nn.ReLU), numbers(3, 2, 6, 6)),
    case("residual", Residual, numbers(4, 4)),
    case("batch-norm", lambda: normed(nn.BatchNorm1d(4)), numbers(5, 3), needs=("NativeBatchNormBackward0",)),
    case("layer-norm", lambda: normed(nn.LayerNorm(4)), numbers(5, 3), needs=("NativeLayerNormBackward0",)),
    case("group-norm", lambda: normed(nn.GroupNorm(2, 4)), numbers(5, 3), needs=("NativeGroupNormBackward0",)),
    case(
        "attention",
        attention,
        TOKENS,
        needs=("ScaledDotProductFlashAttentionForCpuBackward0", "NativeLayerNormBackward0", "EmbeddingBackward0"),
    ),
    case("recurrent", Recurrent, numbers(3, 2, 3), needs=("MkldnnRnnLayerBackward0", "TransposeBackward1")),
]
BY_NAME = {case.name: case for case in CASES}
