"""The networks whose curvature is studied, as a table: how each is made, what it sees, how long it is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import mnist, synthetic

Data = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""From a count and a generator to that many examples."""

BATCH, STEP_SIZE = 32, 1e-3
"""Training is plain Adam, as in the ICML version's experiment on MNIST."""


@dataclass(frozen=True)
class Size:
    """How much of an experiment is done."""

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
    data: Data | None = None  # None: MNIST, read from a folder


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


class Transformer(nn.Module):
    """Two pre-norm encoder layers (width 12, two heads, GELU) over six tokens, read out at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(synthetic.VOCABULARY, 12), nn.Embedding(synthetic.LENGTH, 12)
        layer = functools.partial(nn.TransformerEncoderLayer, 12, 2, 24, dropout=0.0, activation="gelu")
        self.blocks = nn.Sequential(*(layer(batch_first=True, norm_first=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, synthetic.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for the token asked for, [N, vocabulary]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))[:, 0]))


_MNIST = Size(10, 100, 10_000), Size(2, 20, 500)
_SMALL = Size(5, 20, 2_000), Size(1, 3, 200)

NETWORKS: Mapping[str, Network] = {
    "paper": Network(
        "6-16-16-16-10 tanh, random data",
        functools.partial(mlp, 6, 16, 16, 16, 10, activation=nn.Tanh),
        Size(40, 1000, 0),
        Size(10, 100, 0),
        synthetic.noise,
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
    "cnn": Network("CNN, noisy templates", cnn, *_SMALL, synthetic.templates),
    "transformer": Network("transformer, look-up task", Transformer, *_SMALL, synthetic.lookup),
}


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A float64 model with torch's default initialization from this seed; the global generator is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()


def sources(network: Network, folder: Path | None) -> tuple[Data, Data]:
    """Where training and measured examples come from."""
    if network.data is not None:
        return network.data, network.data
    if folder is None:
        raise FileNotFoundError("this network needs MNIST: point --data at a folder as torchvision makes it")
    return tuple(_picker(*mnist.load(folder, train=train)) for train in (True, False))  # type: ignore[return-value]


def _picker(x: Tensor, y: Tensor) -> Data:
    def pick(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        places = torch.randint(len(x), (count,), generator=generator)
        return x[places], y[places]

    return pick


def train(model: nn.Module, data: Data, *, updates: int, generator: torch.Generator) -> None:
    """Trains the model in place."""
    if not updates:
        return
    optimizer = torch.optim.Adam(model.parameters(), lr=STEP_SIZE, fused=True)
    for _ in range(updates):
        x, y = data(BATCH, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
