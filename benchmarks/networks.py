"""Networks of the sizes people train, with a batch and a loss each, for the measurements beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hesscale_lab.tasks import cost_networks as lab
from hesscale_lab.tasks.cost_networks import Problem, Reader, residual_network

__all__ = ["NETWORKS", "RECURRENT", "Problem", "Reader", "recurrent_losses", "residual_network"]


def _problem(network: nn.Module, inputs: Tensor, classes: int) -> Problem:
    return Problem(network, inputs, torch.randint(0, classes, (len(inputs),)))


def mlp() -> Problem:
    """16 layers of 512 tanh units, batch 128."""
    return _problem(lab.tanh_network(16, 100), lab.vectors(128), 100)


def wide() -> Problem:
    """Three layers of 4096 ReLU units, batch 16: mostly parameters."""
    layers = [module for _ in range(3) for module in (nn.Linear(4096, 4096), nn.ReLU())]
    return _problem(nn.Sequential(*layers, nn.Linear(4096, 10)), torch.randn(16, 4096), 10)


def three_conv_three_dense() -> Problem:
    """The CIFAR-10 network of the paper (3C3D, tanh), batch 128."""
    return _problem(lab.three_conv_three_dense(), lab.images(128), 10)


def resnet18() -> Problem:
    """ResNet-18 for 32 × 32 images (11 million parameters), batch 16."""
    return _problem(residual_network(64, 2), lab.images(16), 10)


def transformer() -> Problem:
    """4 layers of width 256, 4 heads, 128 tokens, batch 8."""
    return _problem(lab.transformer(), lab.sentences(8), 10)


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

RECURRENT: dict[str, tuple[type[nn.RNNBase], Callable[..., Any]]] = {
    "LSTM": (nn.LSTM, torch.lstm_cell),
    "GRU": (nn.GRU, torch.gru_cell),
    "RNN": (nn.RNN, torch.rnn_tanh_cell),
}
"""A kind of layer, and one step of it."""


def recurrent_losses(kind: str, width: int, steps: int, batch: int = 16) -> tuple[Tensor, Tensor]:
    """The loss of a layer as torch has it, and that of the same cells written out in a loop."""
    module, cell = RECURRENT[kind]
    layer, x = module(width, width), torch.randn(steps, batch, width)
    state: Any = torch.zeros(batch, width)
    state = (state, state) if module is nn.LSTM else state
    outputs = []
    for step in x.unbind(0):
        state = cell(step, state, *layer.all_weights[0])
        outputs.append(state[0] if module is nn.LSTM else state)
    return layer(x)[0].square().mean(), torch.stack(outputs).square().mean()
