"""The networks that are trained, layer by layer as the authors' code has them and, as a variant, as DeepOBS has them.

The authors' convolutional networks have no padding, where DeepOBS pads most layers as TensorFlow's "same" does: where
the padding is uneven, the extra row and column go to the bottom and the right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import init

Activation = Callable[[], nn.Module]
Scale = Callable[[int], int]  # from a hidden width of the paper to that of this network
Layers = Callable[[int, int, Activation, Scale, bool], list[nn.Module]]  # from inputs, classes, …, and padding or not
ACTIVATIONS: dict[str, Activation] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}


class Dropout(nn.Module):
    """Dropout whose masks come from a generator, so that a run can be repeated."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x with entries set to zero and the others scaled up; x itself in evaluation."""
        if not self.training:
            return x
        keep = 1 - self.rate
        return x * torch.empty_like(x).bernoulli_(keep, generator=self.generator).div_(keep)


def seed_dropout(model: nn.Module, generator: torch.Generator) -> None:
    """Makes every dropout of the model draw from this generator."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.generator = generator


@dataclass(frozen=True)
class Classifier:
    """The layers of a network, and how weights and biases begin."""

    layers: Layers
    convolution: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    bias: float = 0.0

    def __call__(
        self, *, inputs: int, classes: int, activation: str, width: float, padded: bool, generator: torch.Generator
    ) -> nn.Module:
        """The network, initialized from the generator; ``width`` multiplies all hidden widths."""
        with torch.device("meta"):
            layers = self.layers(
                inputs, classes, ACTIVATIONS[activation], lambda size: max(1, round(size * width)), padded
            )
        model = nn.Sequential(*layers).to_empty(device="cpu")
        for module in model:
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                initialize = self.convolution if isinstance(module, nn.Conv2d) else self.linear
                initialize(module.weight, generator=generator)
                init.constant_(module.bias, self.bias)  # type: ignore[arg-type]
        return model


def _truncated_normal(weight: Tensor, *, generator: torch.Generator) -> Tensor:
    return init.trunc_normal_(weight, std=0.03, a=-0.06, b=0.06, generator=generator)


def _mlp(*hidden: int) -> Layers:
    def layers(inputs: int, classes: int, act: Activation, scaled: Scale, padded: bool) -> list[nn.Module]:
        widths = [inputs, *map(scaled, hidden), classes]
        return [nn.Flatten(), *[layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), act())][:-1]]

    return layers


def _three_c_three_d(inputs: int, classes: int, act: Activation, scaled: Scale, padded: bool) -> list[nn.Module]:
    """Padded are max-pooling and the third convolution: 9 × 128 instead of 128 values reach the linear layers."""
    a, b, c, d, e = map(scaled, (64, 96, 128, 512, 256))

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=padded)  # on even sizes the same as TensorFlow's "same"

    return [
        nn.Conv2d(inputs, a, 5), act(), pool(),
        nn.Conv2d(a, b, 3), act(), pool(),
        nn.Conv2d(b, c, 3, padding=int(padded)), act(), pool(), nn.Flatten(),
        nn.Linear(9 * c if padded else c, d), act(), nn.Linear(d, e), act(), nn.Linear(e, classes),
    ]  # fmt: skip


def _all_cnn_c(inputs: int, classes: int, act: Activation, scaled: Scale, padded: bool) -> list[nn.Module]:
    """Nine convolutions, two of stride 2, then an average over what is left of the image."""
    a, b = scaled(96), scaled(192)

    def conv(before: int, after: int, size: int = 3, stride: int = 1, *, pad: bool = padded) -> list[nn.Module]:
        if not pad or size == 1:
            return [nn.Conv2d(before, after, size, stride), act()]
        if stride == 1:
            return [nn.Conv2d(before, after, size, padding=1), act()]
        return [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(before, after, size, stride), act()]

    return [
        Dropout(0.2), *conv(inputs, a), *conv(a, a), *conv(a, a, stride=2),
        Dropout(0.5), *conv(a, b), *conv(b, b), *conv(b, b, stride=2),
        Dropout(0.5), *conv(b, b, pad=False), *conv(b, b, 1), *conv(b, classes, 1),
        nn.AvgPool2d(6 if padded else 2), nn.Flatten(),
    ]  # fmt: skip


mlp = Classifier(_mlp(1000, 500, 100), _truncated_normal, _truncated_normal)
"""inputs-1000-500-100-classes. Weights: normal with σ = 0.03, cut off at 2σ."""
small_mlp = Classifier(_mlp(64, 32), init.xavier_uniform_, init.xavier_uniform_)
"""inputs-64-32-classes: not in the paper, for data of a few hundred images."""
three_c_three_d = Classifier(_three_c_three_d, init.xavier_normal_, init.xavier_uniform_)
all_cnn_c = Classifier(_all_cnn_c, init.xavier_normal_, init.xavier_normal_, bias=0.1)
