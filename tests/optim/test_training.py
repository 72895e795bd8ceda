"""It trains: handwritten digits to the accuracy that Adam reaches, with the default learning rate."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hesscale

EPOCHS = 5


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = load_digits()
    x, y = torch.tensor(found.data / 16 - 0.5, dtype=torch.float32), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]


def network(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def accuracy(kind: str, preset: Any, seed: int = 0, **options: Any) -> float:
    x, y, x_test, y_test = digits()
    model = network(kind, seed)
    optimizer = preset(model.parameters(), **options)
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x), generator=order).split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(x_test).argmax(1) == y_test).float().mean())


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_digits(kind: str) -> None:
    adam = accuracy(kind, torch.optim.Adam)
    assert adam > 0.8
    assert accuracy(kind, hesscale.AdaHesScale) >= adam
    assert accuracy(kind, hesscale.AdaHesScaleGN) >= adam
    assert accuracy(kind, hesscale.AdaHesScale, every=10) >= adam
