"""The networks whose steps are measured, as tables of workloads: a network and a batch size each.

The two panels of the paper's figure 2, as its text has them: one hidden layer with more and more outputs, and more and
more hidden layers. The authors' code differs: a squared error, batch 1, no biases, and in the first panel 256 linear
units with 256 to 8192 outputs. Here the loss is cross-entropy on random labels, as in everything else they trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .classifiers import three_c_three_d
from .networks import Reader as Reader
from .networks import mlp

INPUTS, WIDTH = 64, 512
BATCHES = (1, 32, 128)
OUTPUTS = tuple(2**power for power in range(4, 10))
LAYERS = tuple(2**power for power in range(8))
HEADLINE = (1, 4, 16)
"""Numbers of layers whose cells, at all batch sizes, make up the headline."""

_QUICK_OUTPUTS = (16, 512)


@dataclass(frozen=True)
class Problem:
    """A network, a batch of inputs, and targets for cross-entropy."""

    network: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self) -> Tensor:
        """The mean cross-entropy of the batch."""
        return F.cross_entropy(self.network(self.inputs), self.targets)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.network.parameters())


@dataclass(frozen=True)
class Workload:
    """A network and a batch size whose step is measured."""

    panel: str  # outputs, layers or networks
    title: str
    batch: int
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    quick: bool = False
    headline: bool = False

    @property
    def name(self) -> str:
        """The unique name of the cell."""
        return f"{self.title}, batch {self.batch}"

    def problem(self, seed: int = 0) -> Problem:
        """The same network and batch at every call; the global generator is put back."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Problem(self.make(), self.inputs(self.batch), torch.randint(self.classes, (self.batch,)))


def tanh_network(layers: int, outputs: int) -> nn.Sequential:
    """Hidden layers of 512 tanh units. Weights have variance 1/512, so that signals keep their size on the way.

    With torch's own initialization they shrink by √3 a layer, and curvature by 3: after some 80 layers all that is
    left are denormal numbers, which processors add and multiply many times more slowly than others.
    """
    network = mlp(INPUTS, *[WIDTH] * layers, outputs, activation=nn.Tanh)
    for layer in network:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return network


def three_conv_three_dense() -> nn.Module:
    """3C3D, the authors' network for CIFAR-10, with tanh."""
    options = {"activation": "tanh", "width": 1.0, "padded": False, "generator": torch.default_generator}
    return three_c_three_d(inputs=3, classes=10, **options)  # type: ignore[arg-type]


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


def residual_network(width: int, blocks: int) -> nn.Sequential:
    """Four stages of residual blocks, each half the size and twice the width of the one before."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    for stage in range(4):
        for block in range(blocks):
            inputs = width * 2 ** max(stage - 1, 0) if block == 0 else width * 2**stage
            layers.append(Residual(inputs, width * 2**stage, 2 if stage and not block else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, 10))


def transformer(width: int = 256, layers: int = 4) -> nn.Module:
    """4 layers of width 256 with 4 heads, over 1000 words: 3.4 million parameters."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
    return Reader(1000, width, nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), 10)


def recurrent_network() -> nn.Module:
    """An LSTM of 96 units over 1000 words."""
    return Reader(1000, 96, nn.LSTM(96, 96, batch_first=True), 10)


def vectors(count: int) -> Tensor:
    """Noise, [count, 64]."""
    return torch.randn(count, INPUTS)


def images(count: int) -> Tensor:
    """Noise of CIFAR's size, [count, 3, 32, 32]."""
    return torch.randn(count, 3, 32, 32)


def sentences(count: int, length: int = 128) -> Tensor:
    """Random tokens, [count, 128]."""
    return torch.randint(1000, (count, length))


def _tanh_cell(panel: str, layers: int, outputs: int, batch: int) -> Workload:
    headline = panel == "layers" and layers in HEADLINE
    return Workload(
        panel,
        f"{outputs} outputs" if panel == "outputs" else f"{layers} layer{'s' if layers > 1 else ''}",
        batch,
        functools.partial(tanh_network, layers, outputs),
        vectors,
        outputs,
        quick=headline or (panel == "outputs" and outputs in _QUICK_OUTPUTS),
        headline=headline,
    )


_3C3D = Workload("networks", "3C3D", 128, three_conv_three_dense, images, 10, quick=True)
_TRANSFORMER = Workload("networks", "transformer", 8, transformer, sentences, 10)

CELLS: tuple[Workload, ...] = (
    *(_tanh_cell("layers", layers, 100, batch) for layers in LAYERS for batch in BATCHES),
    *(_tanh_cell("outputs", 1, outputs, batch) for outputs in OUTPUTS for batch in BATCHES),
    _3C3D,
    _TRANSFORMER,
)
"""The cells that are timed."""

WEIGHED: tuple[Workload, ...] = (
    Workload("memory", "MLP, 4 × 512 tanh", 128, functools.partial(tanh_network, 4, 100), vectors, 100, quick=True),
    Workload("memory", "3C3D", 128, three_conv_three_dense, images, 10, quick=True),
    Workload("memory", "ResNet-18", 16, functools.partial(residual_network, 64, 2), images, 10),
    Workload("memory", "transformer", 8, transformer, sentences, 10),
)
"""The cells whose peak of memory is measured."""

_SHORT = functools.partial(sentences, length=32), functools.partial(sentences, length=16)

COMPILED: tuple[Workload, ...] = (
    *(cell for cell in CELLS if cell.headline),
    Workload("networks", "transformer, 2 × 128", 8, functools.partial(transformer, 128, 2), _SHORT[0], 10, quick=True),
    Workload("networks", "ResNet type", 16, functools.partial(residual_network, 16, 1), images, 10),
    Workload("networks", "LSTM, 96 × 16 tokens", 16, recurrent_network, _SHORT[1], 10),
)
"""The cells where compiled passes are compared with eager ones: the headline, and networks that compile quickly."""
