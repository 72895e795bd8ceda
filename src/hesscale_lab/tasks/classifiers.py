"""The networks that are trained, layer by layer as the authors' code has them and, as a variant, as DeepOBS has them.

The authors' convolutional networks have no padding at all, where DeepOBS pads most layers as TensorFlow's "same" does:
where the padding is uneven, the extra row and column go to the bottom and the right. Initialization takes a generator
and leaves torch's global one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import init

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}

Make = Callable[..., nn.Module]
"""Called with ``inputs``, ``classes``, ``activation``, ``width``, ``padded`` and ``generator``."""


class Dropout(nn.Module):
    """Dropout whose masks come from a generator that is handed over, so that a run can be repeated."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x with entries set to zero, the others scaled up; x itself in evaluation."""
        if not self.training:
            return x
        keep = 1 - self.rate
        return x * torch.empty_like(x).bernoulli_(keep, generator=self.generator).div_(keep)


def mlp(
    *, inputs: int, classes: int, activation: str, width: float, padded: bool, generator: torch.Generator
) -> nn.Module:
    """inputs-1000-500-100-classes. Weights: normal with σ = 0.03, cut off at 2σ; biases 0."""
    widths = [inputs, *(_scaled(size, width) for size in (1000, 500, 100)), classes]
    model = _fully_connected(widths, activation)
    return _initialized(model, _truncated_normal, _truncated_normal, bias=0.0, generator=generator)


def small_mlp(
    *, inputs: int, classes: int, activation: str, width: float, padded: bool, generator: torch.Generator
) -> nn.Module:
    """inputs-64-32-classes, Xavier uniform, biases 0: not in the paper, for data of a few hundred images."""
    widths = [inputs, *(_scaled(size, width) for size in (64, 32)), classes]
    return _initialized(
        _fully_connected(widths, activation), init.xavier_uniform_, init.xavier_uniform_, bias=0.0, generator=generator
    )


def _fully_connected(widths: Sequence[int], activation: str) -> nn.Module:
    with torch.device("meta"):
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), ACTIVATIONS[activation]())]
        return nn.Sequential(nn.Flatten(), *layers[:-1])


def three_c_three_d(
    *, inputs: int, classes: int, activation: str, width: float, padded: bool, generator: torch.Generator
) -> nn.Module:
    """Three convolutions with max-pooling, then 512-256-classes. Xavier: normal in convolutions, uniform elsewhere.

    ``padded``: max-pooling and the third convolution; 9 × 128 instead of 128 values reach the linear layers.
    """
    a, b, c, d, e = (_scaled(size, width) for size in (64, 96, 128, 512, 256))
    act = ACTIVATIONS[activation]

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=padded)  # on even sizes the same as TensorFlow's "same"

    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(inputs, a, 5), act(), pool(),
            nn.Conv2d(a, b, 3), act(), pool(),
            nn.Conv2d(b, c, 3, padding=int(padded)), act(), pool(), nn.Flatten(),
            nn.Linear(9 * c if padded else c, d), act(), nn.Linear(d, e), act(), nn.Linear(e, classes),
        )  # fmt: skip
    return _initialized(model, init.xavier_normal_, init.xavier_uniform_, bias=0.0, generator=generator)


def all_cnn_c(
    *, inputs: int, classes: int, activation: str, width: float, padded: bool, generator: torch.Generator
) -> nn.Module:
    """Nine convolutions, two of stride 2, then an average over what is left of the image. Xavier normal, biases 0.1."""
    a, b = _scaled(96, width), _scaled(192, width)
    act = ACTIVATIONS[activation]

    def conv(before: int, after: int, size: int = 3, stride: int = 1, *, pad: bool = padded) -> list[nn.Module]:
        if not pad or size == 1:
            return [nn.Conv2d(before, after, size, stride), act()]
        if stride == 1:
            return [nn.Conv2d(before, after, size, padding=1), act()]
        return [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(before, after, size, stride), act()]

    with torch.device("meta"):
        model = nn.Sequential(
            Dropout(0.2), *conv(inputs, a), *conv(a, a), *conv(a, a, stride=2),
            Dropout(0.5), *conv(a, b), *conv(b, b), *conv(b, b, stride=2),
            Dropout(0.5), *conv(b, b, pad=False), *conv(b, b, 1), *conv(b, classes, 1),
            nn.AvgPool2d(6 if padded else 2), nn.Flatten(),
        )  # fmt: skip
    return _initialized(model, init.xavier_normal_, init.xavier_normal_, bias=0.1, generator=generator)


def seed_dropout(model: nn.Module, generator: torch.Generator) -> None:
    """Makes every dropout of the model draw from this generator."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.generator = generator


def _scaled(size: int, width: float) -> int:
    return max(1, round(size * width))


def _truncated_normal(weight: Tensor, *, generator: torch.Generator) -> Tensor:
    return init.trunc_normal_(weight, std=0.03, a=-0.06, b=0.06, generator=generator)


def _initialized(
    model: nn.Module, convolution: Callable, linear: Callable, *, bias: float, generator: torch.Generator
) -> nn.Module:
    model = model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            (convolution if isinstance(module, nn.Conv2d) else linear)(module.weight, generator=generator)
            init.constant_(module.bias, bias)  # type: ignore[arg-type]
    return model
