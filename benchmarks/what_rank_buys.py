"""Whether a diagonal that is closer helps training: AdaHesScale with columns and without, on MNIST.

Prints the table of docs/how-wrong-can-it-be.md.

$ python benchmarks/what_rank_buys.py --data DIR
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale_lab.optimizers import best_settings
from hesscale_lab.tasks.archives import read_mnist
from hesscale_lab.tasks.networks import mlp

Examples = tuple[Tensor, Tensor]

RANKS = (0, 1, 3, "full")


def examples(folder: Path, *, train: bool, count: int) -> Examples:
    """The first ``count`` images, flattened, pixels in [0, 1], and their labels."""
    images, labels = read_mnist(folder, train=train)
    return images[:count].flatten(1).float() / 255, labels[:count]


def batches(data: Examples, size: int, generator: torch.Generator | None = None) -> list[Examples]:
    """All of the data once, in the order it has or in a random one."""
    x, y = data
    order = torch.arange(len(y)) if generator is None else torch.randperm(len(y), generator=generator)
    return [(x[places], y[places]) for places in order.split(size)]


def epoch(model: nn.Module, optimizer: Any, data: Examples, generator: torch.Generator) -> None:
    """One pass over the data in batches of 128, by an optimizer of torch's or of ours."""
    backward = getattr(optimizer, "backward", Tensor.backward)
    for x, y in batches(data, 128, generator):
        optimizer.zero_grad()
        backward(F.cross_entropy(model(x), y))
        optimizer.step()


@torch.no_grad()
def measure(model: nn.Module, data: Examples) -> tuple[float, float]:
    """The mean loss, and how many of a hundred are right."""
    scores = model(data[0])
    return float(F.cross_entropy(scores, data[1])), 100 * float((scores.argmax(1) == data[1]).float().mean())


def print_training(data: Examples, held_out: Examples, *, seeds: int, epochs: int) -> None:
    """AdaHesScale at every rank, all else equal: the paper's MLP with tanh and the authors' step size."""
    lr, beta1, beta2 = best_settings("mnist-mlp", "AdaHesScale")
    print("| AdaHesScale | training loss | test loss | test accuracy | seconds |\n|---|---:|---:|---:|---:|")
    for rank in RANKS:
        rows = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = mlp(784, 1000, 500, 100, 10, activation=nn.Tanh)
            optimizer = hesscale.AdaHesScale(model.parameters(), lr=lr, betas=(beta1, beta2), rank=rank)
            order, start = torch.Generator().manual_seed(seed), time.perf_counter()
            for _ in range(epochs):
                epoch(model, optimizer, data, order)
            taken = time.perf_counter() - start
            rows.append((measure(model, data)[0], *measure(model, held_out), taken))
        cells = " | ".join(
            f"{statistics.fmean(column):.4g} ({spread(column):.2g})" for column in zip(*rows, strict=True)
        )
        print(f"| `rank={rank!r}` | {cells} |".replace("'", '"'), flush=True)


def spread(values: tuple[float, ...]) -> float:
    """Between the highest and the lowest."""
    return max(values) - min(values)


def main() -> None:
    """Prints what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST/raw")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--examples", type=int, default=10_000, help="how many to train with")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = examples(options.data, train=True, count=options.examples)
    held_out = examples(options.data, train=False, count=10_000)
    print_training(data, held_out, seeds=options.seeds, epochs=options.epochs)


if __name__ == "__main__":
    main()
