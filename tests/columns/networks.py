"""Networks and losses that columns are tried on, and what they should give, by the plainest means there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..optim.small import random

Loss = Callable[[Tensor], Tensor]
N, CLASSES = 5, 4


class Tied(nn.Module):
    """An embedding that is the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(CLASSES, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.table(x).mean(1))) @ self.table.weight.t()


class Reader(nn.Module):
    """A body over embedded tokens; classes from the mean over time."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(6, 4), body, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.embedding(x))
        return self.head((y[0] if isinstance(y, tuple) else y).mean(1))


class Shared(nn.Module):
    """One layer that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.head(x)


def mlp(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 5), activation(), nn.Linear(5, CLASSES))


def cnn(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), activation(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, groups=1), activation(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, CLASSES),
    )  # fmt: skip


def transformer(activation: str = "gelu", *, norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
    )
    return Reader(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 4)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES))


def tokens() -> Tensor:
    return torch.randint(0, 4, (N, 3), generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


NETWORKS = {
    "mlp": Case(lambda: mlp(nn.Tanh), lambda: random(N, 3)),
    "mlp relu": Case(lambda: mlp(nn.ReLU), lambda: random(N, 3)),
    "cnn": Case(lambda: cnn(nn.GELU), lambda: random(N, 2, 6, 6)),
    "cnn relu": Case(lambda: cnn(nn.ReLU), lambda: random(N, 2, 6, 6)),
    "transformer": Case(transformer, tokens),
    "transformer relu": Case(lambda: transformer("relu", norm_first=True), tokens),
    "lstm": Case(lambda: Reader(nn.LSTM(4, 3, batch_first=True), 3), tokens),
    "gru": Case(lambda: Reader(nn.GRU(4, 3, batch_first=True), 3), tokens),
    "tied": Case(Tied, tokens),
    "shared": Case(Shared, lambda: random(N, 3)),
    "batch norm": Case(normed, lambda: random(N, 3)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = NETWORKS[name].make().double()
    for seed, p in enumerate(model.parameters()):
        p.data.copy_(0.8 * random(*p.shape, seed=seed))
    return model, NETWORKS[name].inputs()


LABELS = torch.arange(N) % CLASSES
WEIGHTS = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda y: F.cross_entropy(y, LABELS),
    "weighted, smoothed, summed": lambda y: F.cross_entropy(
        y, LABELS, WEIGHTS, label_smoothing=0.1, reduction="sum"
    ),
    "ignored": lambda y: F.cross_entropy(y, LABELS.masked_fill(LABELS == 1, -100)),
    "soft targets": lambda y: F.cross_entropy(y, random(N, CLASSES, seed=4).softmax(1)),
    "by example": lambda y: (F.cross_entropy(y, LABELS, reduction="none") * random(N, seed=5).abs()).sum(),
    "policy gradient": lambda y: (F.cross_entropy(y, LABELS, reduction="none") * random(N, seed=5)).mean(),
    "nll": lambda y: 3 * F.nll_loss(F.log_softmax(y, 1), LABELS),
    "squared error": lambda y: F.mse_loss(y, random(N, CLASSES, seed=6)),
    "by hand": lambda y: ((y - random(N, CLASSES, seed=6)) ** 2 * WEIGHTS).mean(),
    "huber": lambda y: F.huber_loss(y, random(N, CLASSES, seed=6)),
    "binary": lambda y: F.binary_cross_entropy_with_logits(
        y, (random(N, CLASSES, seed=6) > 0).double(), WEIGHTS, pos_weight=WEIGHTS
    ),
    "two terms": lambda y: F.cross_entropy(y[:, :2], LABELS % 2) + F.mse_loss(y[:, 2:], random(N, 2)),
}  # fmt: skip


def blocks(loss: Loss, y: Tensor) -> Tensor:
    """The Hessian of the loss at each example's outputs, [N, outputs, outputs]."""
    whole = torch.autograd.functional.hessian(loss, y.detach())
    return torch.stack([whole[n, :, n, :] for n in range(len(y))])


def leading(h: Tensor, rank: int) -> Tensor:
    """The eigenvectors of the largest |eigenvalues|, [columns, N, outputs], and those values' signs, [columns, N]."""
    values, vectors = torch.linalg.eigh(h)
    order = values.abs().argsort(-1, descending=True)[:, :rank]
    values, vectors = values.gather(-1, order), vectors.gather(-1, order.unsqueeze(1).expand(-1, h.shape[-1], -1))
    return (vectors * values.abs().sqrt().unsqueeze(1)).movedim(-1, 0), values.sign().T


def columns_one_by_one(model: nn.Module, y: Tensor, h: Tensor, rank: int) -> list[Tensor]:
    """Σ_n Σ_j ± (J_nᵀ u_nj)²: one backward pass for each example and column."""
    params = [*model.parameters()]
    found = [torch.zeros_like(p) for p in params]
    for u, signs in zip(*leading(h, rank), strict=True):
        for n in range(len(y)):
            pulled = torch.autograd.grad(y[n], params, u[n], retain_graph=True, allow_unused=True)
            for total, g in zip(found, pulled, strict=True):
                total += 0 if g is None else signs[n] * g.square()
    return found


def remainder(h: Tensor, rank: int) -> Tensor:
    """What is left of the diagonals, [N, outputs]."""
    u, signs = leading(h, rank)
    return h.diagonal(dim1=-2, dim2=-1) - (signs.unsqueeze(-1) * u.square()).sum(0)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])
