"""Small networks of all common kinds, as a table, with random and with learnable data: to try optimizers on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 5
FEATURES, WORDS, LENGTH = 16, 20, 8
SHAPE = (3, 8, 8)  # of an image
DATA = ("random", "learnable")
"""One batch with random labels, again and again; or new batches each time, with labels that inputs decide."""

Inputs = Callable[[int, torch.Generator], Tensor]


def vectors(count: int, generator: torch.Generator) -> Tensor:
    """Noise, [count, FEATURES]."""
    return torch.randn(count, FEATURES, generator=generator)


def images(count: int, generator: torch.Generator) -> Tensor:
    """Noise, [count, *SHAPE]."""
    return torch.randn(count, *SHAPE, generator=generator)


def tokens(count: int, generator: torch.Generator) -> Tensor:
    """Words, [count, LENGTH]."""
    return torch.randint(2, WORDS, (count, LENGTH), generator=generator)


def labels(inputs: Tensor) -> Tensor:
    """The class that a fixed random linear map of an input, or of its counts of words, favors."""
    words = not inputs.is_floating_point()
    features = F.one_hot(inputs, WORDS).sum(1).float() if words else inputs.flatten(1)
    directions = torch.randn(features.shape[1], CLASSES, generator=torch.Generator().manual_seed(0))
    return (features @ directions).argmax(1)


@dataclass(frozen=True)
class SmallNetwork:
    """One row: how to make a network, and what it is fed."""

    make: Callable[[], nn.Module]
    inputs: Inputs

    def batch(self, count: int, data: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels of so many examples."""
        inputs = self.inputs(count, generator)
        random = data == DATA[0]
        return inputs, torch.randint(CLASSES, (count,), generator=generator) if random else labels(inputs)


ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "tanh": nn.Tanh,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
}


def mlp(depth: int, width: int, activation: str, *, norm: bool) -> nn.Module:
    """So many hidden layers, perhaps with a layer norm before each activation."""
    layers: list[nn.Module] = []
    for inputs in [FEATURES, *[width] * (depth - 1)]:
        layers += [nn.Linear(inputs, width), *([nn.LayerNorm(width)] if norm else []), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


_NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "batch norm": nn.BatchNorm2d,
    "group norm": functools.partial(nn.GroupNorm, 2),
}


def cnn(depth: int, activation: str, norm: str) -> nn.Module:
    """So many 3 × 3 convolutions, the second of which halves the image, and a mean over places."""
    layers: list[nn.Module] = []
    for place, inputs in enumerate([SHAPE[0], *[8] * (depth - 1)]):
        made = [_NORMS[norm](8)] if norm in _NORMS else []
        layers += [nn.Conv2d(inputs, 8, 3, 2 if place == 1 else 1, 1), *made, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES))


class Reader(nn.Module):
    """Embeds words, runs a sequence model over them, and classifies the mean of its outputs, perhaps normalized."""

    def __init__(self, body: nn.Module, *, width: int, norm: bool = False) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(WORDS, width), body
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Any:
        """Logits, [batch, CLASSES]."""
        outputs = self.body(self.embedding(words))
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return self.head(self.norm(outputs.mean(1)))


def recurrent(kind: type[nn.LSTM | nn.GRU], depth: int, *, norm: bool) -> nn.Module:
    """A recurrent network of width 16."""
    return Reader(kind(16, 16, depth, batch_first=True), width=16, norm=norm)


def transformer(depth: int, activation: str, *, norm_first: bool) -> nn.Module:
    """An encoder of width 16 with two heads."""
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
    )
    return Reader(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), width=16)


class Residual(nn.Module):
    """x + scale ∘ body(x), with a learnt scale that starts small, as in ConvNeXt and CaiT."""

    def __init__(self, body: nn.Module, width: int, scale: float) -> None:
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        return x + self.scale * self.body(x)


def residual(depth: int, activation: str, scale: float) -> nn.Module:
    """So many residual blocks of width 32."""
    blocks = [
        Residual(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), ACTIVATIONS[activation](), nn.Linear(64, 32)), 32, scale
        )
        for _ in range(depth)
    ]
    return nn.Sequential(nn.Linear(FEATURES, 32), *blocks, nn.Linear(32, CLASSES))


def _rows() -> Iterator[tuple[str, Callable[[], nn.Module], Inputs]]:
    for depth, width in ((2, 32), (5, 32), (2, 128)):
        for activation in ACTIVATIONS:
            for norm in (False, True):
                name = f"MLP {depth}×{width}, {activation}" + (", layer norm" if norm else "")
                yield name, functools.partial(mlp, depth, width, activation, norm=norm), vectors
    for depth, activations in ((2, [*ACTIVATIONS]), (5, ["ReLU", "GELU"])):
        for activation in activations:
            for kind in ("", *_NORMS):
                name = f"CNN {depth}, {activation}" + (f", {kind}" if kind else "")
                yield name, functools.partial(cnn, depth, activation, kind), images
    for kind_of in (nn.LSTM, nn.GRU):
        for depth in (1, 2):
            for norm in (False, True):
                name = f"{kind_of.__name__} {depth}" + (", layer norm" if norm else "")
                yield name, functools.partial(recurrent, kind_of, depth, norm=norm), tokens
    for depth in (1, 3):
        for activation in ("relu", "gelu"):
            for norm_first in (False, True):
                name = f"transformer {depth}, {activation}, norm {'first' if norm_first else 'last'}"
                yield name, functools.partial(transformer, depth, activation, norm_first=norm_first), tokens
    for activation, scale in (("ReLU", 1e-4), ("GELU", 1e-4), ("GELU", 1.0)):
        yield f"residual 3, {activation}, scale {scale:g}", functools.partial(residual, 3, activation, scale), vectors


SMALL_NETWORKS: Mapping[str, SmallNetwork] = {name: SmallNetwork(make, inputs) for name, make, inputs in _rows()}
