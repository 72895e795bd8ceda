"""The networks of the study of quality, as a table: how each is made, its data, how long it is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .archives import read_mnist

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""From a count and a generator to ``count`` examples."""

BATCH, STEP_SIZE = 32, 1e-3
"""Training is plain Adam, as in the ICML version's experiment on MNIST."""


_LENGTH, _VOCABULARY = 6, 8  # of the sequences to look things up in


def noise(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The paper's data: x ~ N(0, I₆) and labels drawn uniformly from ten, [N, 6] and [N]."""
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(10, (count,), generator=generator)


def templates(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ten fixed random images under noise of the same size, [N, 1, 10, 10]; the label says which one."""
    fixed = torch.Generator().manual_seed(0)
    images = torch.randn(10, 1, 10, 10, generator=fixed, dtype=torch.float64)
    y = torch.randint(10, (count,), generator=generator)
    return images[y] + torch.randn(count, 1, 10, 10, generator=generator, dtype=torch.float64), y


def lookup(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of tokens, [N, 6]; the first token says at which later position the label is."""
    x = torch.randint(_VOCABULARY, (count, _LENGTH), generator=generator)
    x[:, 0] %= _LENGTH - 1
    return x, x.gather(1, x[:, :1] + 1).squeeze(1)


@dataclass(frozen=True)
class Size:
    """How many seeds, examples and updates a run has."""

    seeds: int
    examples: int
    updates: int  # of training before a second measurement; none if 0


@dataclass(frozen=True)
class Network:
    """One row of the table."""

    title: str
    make: Callable[[], nn.Module]
    full: Size
    quick: Size
    data: Draw | None = None  # None: MNIST, read from a folder


def mlp(*widths: int, activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers of these widths with activations between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    """Two convolutions with tanh and max-pooling, then a linear layer: 830 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class Reader(nn.Module):
    """Embeds words, runs a sequence model over them, and classifies the mean of its outputs, perhaps normalized."""

    def __init__(self, words: int, width: int, body: nn.Module, classes: int, *, norm: bool = False) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(words, width), body
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Any:
        """Logits, [batch, classes]."""
        outputs = self.body(self.embedding(words))
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return self.head(self.norm(outputs.mean(1)))


class Transformer(nn.Module):
    """Two pre-norm encoder layers (width 12, two heads, GELU) over six tokens, read out at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(_VOCABULARY, 12), nn.Embedding(_LENGTH, 12)
        layer = functools.partial(nn.TransformerEncoderLayer, 12, 2, 24, dropout=0.0, activation="gelu")
        self.blocks = nn.Sequential(*(layer(batch_first=True, norm_first=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of every token for the answer, [N, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(positions))[:, 0]))


_MNIST = Size(10, 100, 10_000), Size(2, 20, 500)
_SMALL = Size(5, 20, 2_000), Size(1, 3, 200)

NETWORKS: Mapping[str, Network] = {
    "paper": Network(
        "6-16-16-16-10 tanh, random data",
        functools.partial(mlp, 6, 16, 16, 16, 10, activation=nn.Tanh),
        Size(40, 1000, 0),
        Size(10, 100, 0),
        noise,
    ),
    "mnist-tanh": Network(
        "784-64-64-64-10 tanh, MNIST",
        functools.partial(mlp, 784, 64, 64, 64, 10, activation=nn.Tanh),
        *_MNIST,
    ),
    "mnist-relu": Network(
        "784-64-64-64-10 ReLU, MNIST",
        functools.partial(mlp, 784, 64, 64, 64, 10, activation=nn.ReLU),
        *_MNIST,
    ),
    "cnn": Network("CNN, noisy templates", cnn, *_SMALL, templates),
    "transformer": Network("transformer, look-up task", Transformer, *_SMALL, lookup),
}


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A float64 model with torch's default initialization from this seed; the global generator is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()


@functools.lru_cache(maxsize=1)
def sources(network: Network, folder: Path | None) -> tuple[Draw, Draw]:
    """The training examples, and those that are measured."""
    if network.data is not None:
        return network.data, network.data
    if folder is None:
        raise FileNotFoundError("this network needs MNIST: point --data at a folder as torchvision makes it")
    return _mnist(folder, train=True), _mnist(folder, train=False)


def _mnist(folder: Path, *, train: bool) -> Draw:
    """Draws flattened images in [−1, 1], [N, 784] in float64, and their labels."""
    images, y = read_mnist(folder, train=train)
    x = images.flatten(1).double().div_(127.5).sub_(1)

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(x), (count,), generator=generator)
        return x[rows], y[rows]

    return draw


def train(model: nn.Module, data: Draw, *, updates: int, generator: torch.Generator) -> None:
    """Trains the model in place."""
    if not updates:
        return
    optimizer = torch.optim.Adam(model.parameters(), lr=STEP_SIZE, fused=True)
    for _ in range(updates):
        x, y = data(BATCH, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
