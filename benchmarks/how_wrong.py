"""How far HesScale is from the exact diagonal on a ResNet-type network, a transformer and an LSTM, before and after
some training on a synthetic task. Prints the table of docs/how-wrong-can-it-be.md.

$ python benchmarks/how_wrong.py
"""

from __future__ import annotations

import statistics
import sys

import torch
import torch.nn.functional as F
from networks import Reader, residual_network
from torch import Tensor, nn

from hesscale.testing import Comparison, compare_with_exact

STEPS, ENTRIES, SEED = 150, 40, 0


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


def train(network: nn.Module, source: object) -> None:
    """Some steps of Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(STEPS):
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


def main() -> None:
    """Prints the table."""
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
    main()
