"""Peak memory of a pass with curvature beside a plain backward, each in a process of its own.

$ python benchmarks/peak_memory.py
"""

from __future__ import annotations

import resource
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale


def mlp() -> tuple[nn.Module, Tensor, int]:
    """16 layers of 512 tanh units, batch 128."""
    hidden = [module for _ in range(16) for module in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), *hidden, nn.Linear(512, 100)), torch.randn(128, 64), 100


def three_conv_three_dense() -> tuple[nn.Module, Tensor, int]:
    """The CIFAR-10 network of the paper (3C3D), batch 128."""
    network = nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.Tanh(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 96, 3), nn.Tanh(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(96, 128, 3), nn.Tanh(), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(128, 512), nn.Tanh()),
        *(nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 10)),
    )
    return network, torch.randn(128, 3, 32, 32), 10


def wide() -> tuple[nn.Module, Tensor, int]:
    """Three layers of 4096 ReLU units, batch 16: mostly parameters."""
    layers = [module for _ in range(3) for module in (nn.Linear(4096, 4096), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(4096, 10)), torch.randn(16, 4096), 10


NETWORKS = {"mlp": mlp, "3c3d": three_conv_three_dense, "wide": wide}


def peak(network: str, method: str) -> float:
    """MiB of resident memory that a forward and a backward pass add at their peak to a process with the network."""
    torch.manual_seed(0)
    model, x, classes = NETWORKS[network]()
    targets = torch.randint(0, classes, (len(x),))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = F.cross_entropy(model(x), targets)
    loss.backward() if method == "gradient" else hesscale.backward(loss, method=method)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Prints one line per network and method."""
    if len(sys.argv) == 3:
        sys.stdout.write(f"{peak(*sys.argv[1:])}\n")
        return
    for network in NETWORKS:
        plain = 0.0
        for method in ("gradient", "hesscale", "hesscale_gn"):
            output = subprocess.run([sys.executable, __file__, network, method], capture_output=True, check=True)
            used = float(output.stdout)
            plain = plain or used
            sys.stdout.write(f"{network:6} {method:12} {used:8.0f} MiB  {used / plain:.2f}\n")


if __name__ == "__main__":
    main()
