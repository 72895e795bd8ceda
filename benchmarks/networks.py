"""Networks of the sizes people train, with a batch and a loss each, for the measurements beside this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """A network, inputs, and targets for cross-entropy."""

    network: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self) -> Tensor:
        """The mean cross-entropy of the batch."""
        return F.cross_entropy(self.network(self.inputs), self.targets)


def _problem(network: nn.Module, inputs: Tensor, classes: int) -> Problem:
    return Problem(network, inputs, torch.randint(0, classes, (len(inputs),)))


def mlp() -> Problem:
    """16 layers of 512 tanh units, batch 128."""
    hidden = [module for _ in range(16) for module in (nn.Linear(512, 512), nn.Tanh())]
    return _problem(
        nn.Sequential(nn.Linear(64, 512), nn.Tanh(), *hidden, nn.Linear(512, 100)), torch.randn(128, 64), 100
    )


def wide() -> Problem:
    """Three layers of 4096 ReLU units, batch 16: mostly parameters."""
    layers = [module for _ in range(3) for module in (nn.Linear(4096, 4096), nn.ReLU())]
    return _problem(nn.Sequential(*layers, nn.Linear(4096, 10)), torch.randn(16, 4096), 10)


def three_conv_three_dense() -> Problem:
    """The CIFAR-10 network of the paper (3C3D, tanh), batch 128."""
    network = nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.Tanh(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 96, 3), nn.Tanh(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(96, 128, 3), nn.Tanh(), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(128, 512), nn.Tanh()),
        *(nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 10)),
    )
    return _problem(network, torch.randn(128, 3, 32, 32), 10)


class Residual(nn.Module):
    """Two convolutions with batch norm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        """relu(norm(conv(relu(norm(conv(x))))) + x)."""
        h = F.relu_(self.norms[0](self.first(x)))
        h = self.norms[1](self.second(h))
        h += self.shortcut(x)
        return F.relu_(h)


def residual_network(width: int, blocks: int) -> nn.Module:
    """Four stages of residual blocks, each half the size and twice the width of the one before."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    for stage in range(4):
        for block in range(blocks):
            inputs = width * 2 ** max(stage - 1, 0) if block == 0 else width * 2**stage
            layers.append(Residual(inputs, width * 2**stage, 2 if stage and not block else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, 10))


def resnet18() -> Problem:
    """ResNet-18 for 32 × 32 images (11 million parameters), batch 16."""
    return _problem(residual_network(64, 2), torch.randn(16, 3, 32, 32), 10)


class Reader(nn.Module):
    """Embeds tokens, runs a sequence model over them and classifies the mean of its outputs."""

    def __init__(self, words: int, width: int, body: nn.Module, classes: int) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(words, width), body, nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Any:
        """Logits, [batch, classes]."""
        outputs = self.body(self.embedding(tokens))
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return self.head(outputs.mean(1))


def transformer() -> Problem:
    """4 layers of width 256, 4 heads, 128 tokens, batch 8."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, activation="gelu", batch_first=True)
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return _problem(Reader(1000, 256, body, 10), torch.randint(0, 1000, (8, 128)), 10)


def lstm() -> Problem:
    """2 layers of 256 units, 64 steps, batch 32."""
    return _problem(Reader(1000, 256, nn.LSTM(256, 256, 2, batch_first=True), 10), torch.randint(0, 1000, (32, 64)), 10)


NETWORKS: dict[str, Callable[[], Problem]] = {
    "mlp": mlp,
    "wide": wide,
    "3c3d": three_conv_three_dense,
    "resnet18": resnet18,
    "transformer": transformer,
    "lstm": lstm,
}
