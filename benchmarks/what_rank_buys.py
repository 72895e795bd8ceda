"""Whether a diagonal that is closer helps what is done with it: training, and pruning once, on MNIST.

Prints the tables of docs/how-wrong-can-it-be.md.

$ python benchmarks/what_rank_buys.py train --data DIR    # AdaHesScale with columns and without
$ python benchmarks/what_rank_buys.py prune --data DIR    # weights of least ½hw² set to zero, nothing trained after
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
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
SPARSITIES = (0.8, 0.9, 0.95)
CURVATURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "HesScale": ("hesscale", {}),
    "HesScaleGN": ("hesscale_gn", {}),
    **{f"HesScale, `rank={rank}`": ("hesscale", {"rank": rank}) for rank in (1, 3)},
    'HesScale, `rank="full"`': ("hesscale", {"rank": "full"}),
    "g²": ("squared_gradient", {}),
}


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


def print_pruning(data: Examples, held_out: Examples, *, seeds: int, epochs: int) -> None:
    """Test accuracies when the weights of least saliency are zero, means over seeds."""
    for name, activation in (("ReLU", nn.ReLU), ("tanh", nn.Tanh)):
        found: dict[str, list[list[float]]] = {}
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = mlp(784, 128, 64, 10, activation=activation)
            optimizer, order = torch.optim.Adam(model.parameters(), lr=1e-3), torch.Generator().manual_seed(seed)
            for _ in range(epochs):
                epoch(model, optimizer, data, order)
            found.setdefault("not pruned", []).append([measure(model, held_out)[1]] * len(SPARSITIES))
            for label, scores in saliencies(model, data).items():
                row = [accuracy_without(model, scores, share, held_out) for share in SPARSITIES]
                found.setdefault(label, []).append(row)
        print(f"\n| {name} | {' | '.join(f'{share:.0%}' for share in SPARSITIES)} |\n|---|{'---:|' * len(SPARSITIES)}")
        for label, rows in found.items():
            cells = " | ".join(
                f"{statistics.fmean(c):.1f} ({min(c):.1f} … {max(c):.1f})" for c in zip(*rows, strict=True)
            )
            print(f"| {label} | {cells} |", flush=True)


def saliencies(model: nn.Module, data: Examples) -> dict[str, dict[str, Tensor]]:
    """½hw² of every weight, h over the first 2000 examples, with |h| where h may be negative; and |w|."""
    some = batches((data[0][:2000], data[1][:2000]), 100)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.dim() > 1}
    found = {
        label: hesscale.estimate_over(method, model, F.cross_entropy, some, params=list(weights), **options)
        for label, (method, options) in CURVATURES.items()
    }
    for label in ("HesScale", "HesScale, `rank=3`"):
        found[f"{label}, &#124;h&#124;"] = {name: h.abs() for name, h in found[label].items()}
    scores = {
        label: {name: each[name] * w.square() / 2 for name, w in weights.items()} for label, each in found.items()
    }
    return {**scores, "&#124;w&#124;": {name: w.abs() for name, w in weights.items()}}


def accuracy_without(model: nn.Module, scores: Mapping[str, Tensor], share: float, held_out: Examples) -> float:
    """In percent, with that share of all weights zero, those of the lowest scores. Biases stay."""
    everything = torch.cat([score.reshape(-1) for score in scores.values()])
    threshold = everything.kthvalue(round(share * everything.numel())).values
    params = dict(model.named_parameters())
    kept = {name: params[name].detach() * (score > threshold) for name, score in scores.items()}
    return measure(lambda x: torch.func.functional_call(model, {**params, **kept}, x), held_out)[1]  # type: ignore[arg-type]


def main() -> None:
    """Prints what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "prune"))
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST/raw")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--examples", type=int, default=10_000, help="how many to train with")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = examples(options.data, train=True, count=options.examples)
    held_out = examples(options.data, train=False, count=10_000)
    show = print_training if options.what == "train" else print_pruning
    show(data, held_out, seeds=options.seeds, epochs=options.epochs)


if __name__ == "__main__":
    main()
