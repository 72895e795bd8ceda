"""How far HesScale is from the exact diagonal on networks before and after some training on a synthetic task.

Prints the tables of docs/how-wrong-can-it-be.md.

$ python benchmarks/how_wrong.py          # sampled entries, parameter by parameter
$ python benchmarks/how_wrong.py ranks    # all entries of smaller networks, with rank= from 0 to "full"
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from networks import Reader, residual_network
from torch import Tensor, nn

import hesscale
from hesscale.testing import Comparison, compare_with_exact

STEPS, ENTRIES, SEED = 150, 40, 0
RANKS = (0, 1, 2, 3, "full")


def images(count: int) -> tuple[Tensor, Tensor]:
    """Noisy copies of ten fixed pictures, and which it was."""
    prototypes = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    classes = torch.randint(0, 10, (count,))
    return prototypes[classes] + 2.5 * torch.randn(count, 3, 8, 8), classes


def sentences(count: int) -> tuple[Tensor, Tensor]:
    """Random tokens; the class is the token that follows the first 0, modulo 5."""
    tokens = torch.randint(1, 20, (count, 12))
    place = torch.randint(0, 11, (count,))
    tokens[torch.arange(count), place] = 0
    return tokens, tokens[torch.arange(count), place + 1] % 5


def networks() -> dict[str, tuple[nn.Module, object]]:
    """Name -> network and source of data."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return {
        "ResNet type (8 to 64 channels)": (residual_network(8, 1), images),
        "transformer (2 layers of 32)": (Reader(20, 32, body, 5), sentences),
        "LSTM (32 units)": (Reader(20, 32, nn.LSTM(32, 32, batch_first=True), 5), sentences),
    }


def mlp(activation: type[nn.Module]) -> nn.Module:
    """Three hidden layers of 16 units."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width in (192, 16, 16):
        layers += [nn.Linear(width, 16), activation()]
    return nn.Sequential(*layers, nn.Linear(16, 10))


def cnn(activation: type[nn.Module], pooling: type[nn.Module]) -> nn.Module:
    """Two convolutions, each with a pooling behind it."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), activation(), pooling(2),
        nn.Conv2d(8, 16, 3, padding=1), activation(), pooling(2),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def encoder(activation: str, *, norm_first: bool) -> nn.Module:
    """Two layers of 16 units over tokens."""
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
    )
    return Reader(20, 16, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 5)


def small_networks() -> dict[str, tuple[nn.Module, object]]:
    """Half as wide as ``networks``, so that every entry of the exact diagonal can be had."""
    return {
        "MLP tanh, 3 hidden layers of 16": (mlp(nn.Tanh), images),
        "the same, ReLU": (mlp(nn.ReLU), images),
        "CNN ReLU (2 convolutions, max pooling)": (cnn(nn.ReLU, nn.MaxPool2d), images),
        "CNN GELU, average pooling": (cnn(nn.GELU, nn.AvgPool2d), images),
        "transformer, GELU, post-norm": (encoder("gelu", norm_first=False), sentences),
        "transformer, ReLU, pre-norm": (encoder("relu", norm_first=True), sentences),
        "LSTM": (Reader(20, 16, nn.LSTM(16, 16, batch_first=True), 5), sentences),
        "ResNet type, batch norm while training": (residual_network(4, 1), images),
    }


def train(network: nn.Module, source: object, steps: int = STEPS) -> None:
    """Some steps of Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(steps):
        inputs, targets = source(64)  # type: ignore[operator]
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        optimizer.step()


def row(results: dict[str, Comparison]) -> str:
    """Medians over parameters, and the worst of them."""
    errors = [r.relative_error for r in results.values()]
    worst = max(results, key=lambda name: results[name].relative_error)
    ranks, signs = ([getattr(r, key) for r in results.values()] for key in ("rank_correlation", "sign_agreement"))
    middle = " | ".join(f"{statistics.median(values):.2f}" for values in (errors, ranks, signs))
    return f"{middle} | {results[worst].relative_error:.2f} ({worst})"


def print_ranks() -> None:
    """Σ|estimate − exact| / Σ|exact| over all parameters, for every rank; and what a pass takes in terms of rank 0."""
    names = " | ".join(f"rank {rank}" for rank in RANKS)
    sys.stdout.write(f"| trained network | loss | {names} | GGN-MC, 10 samples | exact GGN | time of rank 1, 3 |\n")
    sys.stdout.write(f"|---|---:|{'---:|' * (len(RANKS) + 3)}\n")
    torch.manual_seed(SEED)  # for the weights
    for name, (network, source) in small_networks().items():
        torch.manual_seed(SEED)
        train(network, source, 300)
        x, y = source(32)  # type: ignore[operator]
        network, batch = network.double(), (x.double() if x.is_floating_point() else x, y)
        exact = hesscale.estimate("hessian", network, F.cross_entropy, batch)
        generator = torch.Generator().manual_seed(SEED)
        ways: list[tuple[str, dict[str, object]]] = [("hesscale", {"rank": rank}) for rank in RANKS]
        ways += [("ggn_mc", {"samples": 10}), ("ggn", {})]
        errors = []
        for method, more in ways:
            found = hesscale.estimate(method, network, F.cross_entropy, batch, generator=generator, **more)  # type: ignore[arg-type]
            off = sum(float((found[key] - exact[key]).abs().sum()) for key in exact)
            errors.append(off / sum(float(s.abs().sum()) for s in exact.values()))
        loss = F.cross_entropy(network(batch[0]), y).item()
        cells = " | ".join(f"{error:.3f}" for error in errors)
        times = [seconds(network.float(), (x, y), rank) for rank in (0, 1, 3)]
        sys.stdout.write(f"| {name} | {loss:.2f} | {cells} | {times[1] / times[0]:.1f}, {times[2] / times[0]:.1f} |\n")
        sys.stdout.flush()


def seconds(network: nn.Module, batch: tuple[Tensor, Tensor], rank: int) -> float:
    """The median of some forward passes and backward passes with that rank."""
    taken = []
    for _ in range(15):
        start = time.perf_counter()
        hesscale.backward(F.cross_entropy(network(batch[0]), batch[1]), rank=rank)
        taken.append(time.perf_counter() - start)
        network.zero_grad()
    return statistics.median(taken)


def main() -> None:
    """Prints the table of sampled entries."""
    sys.stdout.write("| network | method | trained | loss | relative L1 error | rank | sign | worst parameter |\n")
    sys.stdout.write("|---|---|---|---:|---:|---:|---:|---|\n")
    torch.manual_seed(SEED)
    for name, (network, source) in networks().items():
        batch = source(32)  # type: ignore[operator]
        for trained in ("no", "yes"):
            if trained == "yes":
                train(network, source)
            for method in ("hesscale", "hesscale_gn"):
                results = compare_with_exact(network, F.cross_entropy, batch, entries=ENTRIES, method=method, seed=SEED)
                loss = F.cross_entropy(network(batch[0]), batch[1]).item()
                sys.stdout.write(f"| {name} | `{method}` | {trained} | {loss:.3f} | {row(results)} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    print_ranks() if sys.argv[1:] == ["ranks"] else main()
