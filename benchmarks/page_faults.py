"""What it costs that the C library gives memory back to the system: milliseconds and page faults of a step.

    python benchmarks/page_faults.py [--steps 60] [--rounds 3]

Every optimizer trains alone in a fresh process, as it does for most people, with the settings that glibc begins with
and with those that keep memory. Medians over rounds. Linux only.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch

import hesscale
from hesscale_lab.tasks.cost_networks import CELLS

KEEP = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}
OPTIMIZERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-6),
    "AdaHesScale": lambda params: hesscale.AdaHesScale(params, lr=1e-6),
}
NETWORKS = ("4 layers, batch 32", "16 layers, batch 1", "16 layers, batch 128")


def train(network: str, name: str, steps: int) -> tuple[float, float]:
    """Milliseconds and page faults per step."""
    import resource  # there is none on Windows

    torch.set_num_threads(1)
    problem = next(cell for cell in CELLS if cell.name == network).problem()
    optimizer = OPTIMIZERS[name](problem.network.parameters())
    backward = getattr(optimizer, "backward", torch.Tensor.backward)
    start, faults = 0.0, 0
    for step in range(20 + steps):
        if step == 20:
            start, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.zero_grad()
        backward(problem.loss())
        optimizer.step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return 1000 * (time.perf_counter() - start) / steps, faults / steps


def in_fresh_process(network: str, name: str, steps: int, settings: dict[str, str]) -> tuple[float, float]:
    """As ``train``."""
    command = [sys.executable, __file__, "--steps", str(steps), "--one", network, name]
    found = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    milliseconds, faults = map(float, found.stdout.split())
    return milliseconds, faults


def main() -> None:
    """Prints one row per network and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(*train(*arguments.one, arguments.steps))
        return
    print("| network | optimizer | ms | page faults | ms, memory kept | page faults |")
    print("|---|---|---:|---:|---:|---:|")
    for network in NETWORKS:
        for name in OPTIMIZERS:
            cells: list[str] = []
            for settings in (dict[str, str](), KEEP):
                runs = [in_fresh_process(network, name, arguments.steps, settings) for _ in range(arguments.rounds)]
                milliseconds, faults = map(statistics.median, zip(*runs, strict=True))
                cells += [f"{milliseconds:.1f}", f"{faults:.0f}"]
            print(f"| {network} | {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
