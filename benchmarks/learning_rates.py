"""Accuracy on handwritten digits over a grid of learning rates: which default is safe, and how wide the good range is.

    python benchmarks/learning_rates.py [--seeds 3] [--epochs 8]

Two small networks, batches of 64, 1400 examples to train, 397 to test. A Markdown table: mean (lowest) over seeds.
"""

import argparse
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hesscale

RATES = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "AdaHesScale": (hesscale.AdaHesScale, {}),
    "AdaHesScale, every=10": (hesscale.AdaHesScale, {"every": 10}),
    "AdaHesScaleGN": (hesscale.AdaHesScaleGN, {}),
    "AdaBL89": (hesscale.AdaBL89, {}),
    "AdaGGNMC": (hesscale.AdaGGNMC, {}),
    "AdaGGNMC, mean": (hesscale.AdaGGNMC, {"scale": "mean"}),
    "AdaHessian": (hesscale.AdaHessian, {}),
}


def network(kind: str) -> nn.Module:
    """An untrained network for 64 pixels and 10 classes."""
    if kind == "MLP, tanh":
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(256, 10)),
    )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels and labels to train on, and to test on."""
    found = load_digits()
    x, y = torch.tensor(found.data / 16 - 0.5, dtype=torch.float32), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]


def accuracy(kind: str, name: str, lr: float, seed: int, epochs: int) -> float:
    """In percent, on the test examples; 0 if the training broke off because something became infinite."""
    x, y, x_test, y_test = digits()
    torch.manual_seed(seed)
    model = network(kind)
    preset, options = OPTIMIZERS[name]
    optimizer = preset(model.parameters(), lr=lr, **options)
    order = torch.Generator().manual_seed(seed)
    try:
        for _ in range(epochs):
            for batch in torch.randperm(len(x), generator=order).split(64):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[batch]), y[batch])
                optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
                optimizer.step()
    except RuntimeError:
        return 0.0
    with torch.no_grad():
        return 100 * float((model(x_test).argmax(1) == y_test).float().mean())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of curvature that vanished where a training has diverged
    for kind in ("MLP, tanh", "CNN, GELU"):
        sys.stdout.write(f"\n| {kind} | " + " | ".join(f"{lr:g}" for lr in RATES) + " |\n")
        sys.stdout.write("|---|" + "---:|" * len(RATES) + "\n")
        for name in OPTIMIZERS:
            cells = []
            for lr in RATES:
                found = [accuracy(kind, name, lr, seed, arguments.epochs) for seed in range(arguments.seeds)]
                cells.append(f"{sum(found) / len(found):.1f} ({min(found):.0f})")
            sys.stdout.write(f"| {name} | " + " | ".join(cells) + " |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
