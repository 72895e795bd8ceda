"""Learning rates and bounds: which defaults are safe, and how wide the good range of step sizes is.

    python benchmarks/learning_rates.py [--seeds 3] [--epochs 8]
    python benchmarks/learning_rates.py --mnist DIR [--seeds 1] [--epochs 1] [--bounds 0,1,3,10] [--warm-up 0]
    python benchmarks/learning_rates.py --transformer [--seeds 3] [--epochs 20] [--bounds 0,1,3,10]
    python benchmarks/learning_rates.py --cifar10 DIR [--seeds 1] [--epochs 2] [--bounds 0,1] [--examples 50000]

Handwritten digits of scikit-learn: two small networks, batches of 64, 1400 examples to train, 397 to test; accuracy in
percent, mean (lowest) over seeds. With --mnist, an MLP 784-128-64-10, with --cifar10, 3C3D with ReLU, batches of 128;
mean training loss of the last epoch / accuracy, means over seeds. The last column is the range of learning rates within
one percent of the row's best accuracy, as a factor. DIR holds the data as torchvision lays it out, and bound 0 is none:
the paper's algorithm. --warm-up adds the paper's algorithm with V averaged over so many steps before the first one that
moves anything. With --transformer, one of six layers of width 192 (norms behind, as in BERT) learns the labels of one
batch of 8 random sentences by heart, a step per epoch. Markdown tables.
"""

import argparse
import itertools
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hesscale
from hesscale_lab.tasks.archives import read_mnist
from hesscale_lab.tasks.table import TASKS

Bounds = tuple[float | None, ...]
Options = dict[str, Any]


class Data(NamedTuple):
    """Inputs and labels to train on, and to test on; what a network reads, and how training goes."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    networks: Mapping[str, Any]
    rates: tuple[float, ...]
    batch: int


def bounded(name: str, preset: Any, bounds: Bounds, **options: Any) -> Iterator[tuple[str, Any, Options]]:
    """One row per bound."""
    for bound in bounds:
        label = "paper" if bound is None else f"bound {bound:g}"
        yield f"{name}, {label}", preset, {**options, "bound": bound}


def few(bounds: Bounds) -> list[tuple[str, Any, Options]]:
    """What is compared everywhere."""
    return [
        ("Adam", torch.optim.Adam, {}),
        *bounded("AdaHesScale", hesscale.AdaHesScale, bounds),
        *bounded("AdaHesScaleGN", hesscale.AdaHesScaleGN, bounds),
    ]


def warmed_up(steps: int) -> list[tuple[str, Any, Options]]:
    """The paper's algorithm, whose V is averaged over so many steps before anything moves."""
    if not steps:
        return []
    options = {"bound": None, "warm_up": steps}
    presets = ("AdaHesScale", hesscale.AdaHesScale), ("AdaHesScaleGN", hesscale.AdaHesScaleGN)
    return [(f"{name}, paper, V warmed up over {steps} steps", preset, options) for name, preset in presets]


def more(bounds: Bounds) -> list[tuple[str, Any, Options]]:
    """The other optimizers."""
    return [
        *bounded("AdaHesScale, every=10", hesscale.AdaHesScale, bounds, every=10),
        *bounded("AdaBL89", hesscale.AdaBL89, bounds),
        *bounded("AdaGGNMC", hesscale.AdaGGNMC, bounds),
        *bounded("AdaGGNMC, mean", hesscale.AdaGGNMC, bounds, scale="mean"),
        *bounded("AdaHessian", hesscale.AdaHessian, bounds),
    ]


def mlp(*widths: int, activation: Any) -> nn.Module:
    """Linear layers with an activation between them."""
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[layer for a, b in pairs for layer in (nn.Linear(a, b), activation())][:-1])


def cnn() -> nn.Module:
    """For 8 × 8 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(256, 10)),
    )


def digits() -> Data:
    """Of scikit-learn."""
    found = load_digits()
    x, y = torch.tensor(found.data / 16 - 0.5, dtype=torch.float32), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    networks = {"MLP, tanh": lambda: mlp(64, 64, 64, 10, activation=nn.Tanh), "CNN, GELU": cnn}
    return Data(x[:1400], y[:1400], x[1400:], y[1400:], networks, (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1), 64)


def mnist(folder: Path) -> Data:
    """Pixels in [0, 1]."""
    parts = [part for train in (True, False) for part in read_mnist(folder, train=train)]
    x, y, x_test, y_test = (part.flatten(1).float() / 255 if part.dim() > 1 else part for part in parts)
    activations = {"MLP, ReLU": nn.ReLU, "MLP, tanh": nn.Tanh}
    networks = {name: lambda kind=kind: mlp(784, 128, 64, 10, activation=kind) for name, kind in activations.items()}
    return Data(x, y, x_test, y_test, networks, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), 128)


def cifar10(folder: Path, examples: int) -> Data:
    """So many images of it."""
    task = TASKS["cifar10-3c3d"].with_fields([("activation", "relu")])
    (x, y), (x_test, y_test) = task.load(folder)
    networks = {"3C3D, ReLU": lambda: task.make(torch.Generator().manual_seed(torch.initial_seed()))}
    inputs = (task.prepare(images) for images in (x[:examples], x_test))
    return Data(next(inputs), y[:examples], next(inputs), y_test, networks, (1e-4, 3e-4, 1e-3, 3e-3), 128)


class Encoder(nn.Module):
    """A transformer of BERT's kind that sorts sentences by their first token's output."""

    def __init__(
        self, words: int = 1000, width: int = 192, layers: int = 6, length: int = 16, classes: int = 5
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True)
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """One row of logits per sentence."""
        return self.last(self.layers(self.words(tokens) + self.places)[:, 0])


def sentences() -> Data:
    """Eight of them, to be learnt by heart."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randint(1000, (8, 16), generator=draws), torch.randint(5, (8,), generator=draws)
    return Data(x, y, x, y, {"transformer 6 × 192": Encoder}, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), 8)


def train(data: Data, kind: str, preset: Any, options: Options, seed: int, epochs: int) -> tuple[float, float]:
    """The mean loss of the last epoch, and the accuracy in percent; (inf, 0) if something became infinite."""
    torch.manual_seed(seed)
    model = data.networks[kind]()
    warm_up = options.get("warm_up", 0)
    optimizer = preset(model.parameters(), **{name: value for name, value in options.items() if name != "warm_up"})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= warm_up))
    order = torch.Generator().manual_seed(seed)
    total = 0.0
    try:
        for _ in range(epochs):
            batches = torch.randperm(len(data.x), generator=order).split(data.batch)
            total = 0.0
            for batch in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(data.x[batch]), data.y[batch])
                optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item() / len(batches)
    except RuntimeError:
        return math.inf, 0.0
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in data.x_test.split(1000)])
    return total, 100 * float((guesses == data.y_test).float().mean())


def width(rates: tuple[float, ...], accuracies: list[float]) -> str:
    """Over which range of rates, without a gap, the accuracy is within one percent of the best."""
    best = accuracies.index(max(accuracies))
    good = [accuracy >= max(accuracies) - 1 for accuracy in accuracies]
    low = best - len(list(itertools.takewhile(bool, reversed(good[:best]))))
    high = best + len(list(itertools.takewhile(bool, good[best + 1 :])))
    return f"{rates[low]:g} to {rates[high]:g} (×{rates[high] / rates[low]:.3g})"


def cell(found: list[tuple[float, float]], *, with_loss: bool) -> str:
    """What a table says about the runs of some seeds."""
    losses, accuracies = ([run[place] for run in found] for place in (0, 1))
    accuracy = sum(accuracies) / len(found)
    if not with_loss:
        return f"{accuracy:.1f} ({min(accuracies):.0f})"
    loss = sum(losses) / len(found)
    return f"{loss:.3f} / {accuracy:.1f}" if loss < 10 else "diverges"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--transformer", action="store_true")
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--bounds", default="0,1,3,10")
    parser.add_argument("--warm-up", type=int, default=0)
    found = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of curvature that vanished where a training has diverged
    bounds = tuple(float(bound) or None for bound in found.bounds.split(","))
    if found.mnist or found.cifar10 or found.transformer:
        data = _data(found)
        show(data, [*few(bounds), *warmed_up(found.warm_up)], found, with_loss=True)
    else:
        show(digits(), [*few(bounds), *more(bounds[:2])], found, with_loss=False)


def _data(found: argparse.Namespace) -> Data:
    if found.transformer:
        return sentences()
    return mnist(found.mnist) if found.mnist else cifar10(found.cifar10, found.examples)


def show(data: Data, rows: list[tuple[str, Any, Options]], found: argparse.Namespace, *, with_loss: bool) -> None:
    """One table per network, row by row as they are found."""
    for kind in data.networks:
        sys.stdout.write(f"\n| {kind} | " + " | ".join(f"{lr:g}" for lr in data.rates) + " | within 1 % |\n")
        sys.stdout.write("|---|" + "---:|" * len(data.rates) + "---|\n")
        for name, preset, options in rows:
            cells, accuracies = [], []
            for lr in data.rates:
                own = {**options, "lr": lr}
                runs = [train(data, kind, preset, own, seed, found.epochs) for seed in range(found.seeds)]
                cells.append(cell(runs, with_loss=with_loss))
                accuracies.append(sum(accuracy for _, accuracy in runs) / len(runs))
            sys.stdout.write(f"| {name} | " + " | ".join([*cells, width(data.rates, accuracies)]) + " |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
