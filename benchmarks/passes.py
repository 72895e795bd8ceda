"""Time and peak memory of one pass with curvature beside a plain backward.

$ python benchmarks/passes.py [network ...]

Times are medians of interleaved rounds (forward and backward together) in one process; memory is what a forward and a
backward pass add, at their peak, to a process with the network in it, each in a process of its own.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

import torch
from networks import NETWORKS, Problem

import hesscale

METHODS = ("gradient", "hesscale", "hesscale_gn")
ROUNDS = 9


def run(problem: Problem, method: str) -> None:
    """One forward and backward pass, from empty gradients."""
    for p in problem.network.parameters():
        p.grad = p.curvature = None  # type: ignore[attr-defined]
    if method == "gradient":
        problem.loss().backward()
    else:
        hesscale.backward(problem.loss(), method=method)


def peak(network: str, method: str) -> float:
    """MiB of resident memory added."""
    torch.manual_seed(0)
    problem = NETWORKS[network]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(problem, method)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def seconds(network: str) -> dict[str, float]:
    """The median time of each method."""
    torch.manual_seed(0)
    problem = NETWORKS[network]()
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(ROUNDS + 2):
        for method in METHODS:
            start = time.perf_counter()
            run(problem, method)
            times[method].append(time.perf_counter() - start)
    return {method: statistics.median(rounds[2:]) for method, rounds in times.items()}


def main() -> None:
    """Prints one line per network and method."""
    if sys.argv[1:2] == ["--peak"]:
        sys.stdout.write(f"{peak(*sys.argv[2:])}\n")
        return
    sys.stdout.write(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    networks = sys.argv[1:] or list(NETWORKS)
    # memory first, from a small process: a child's peak starts at its parent's
    memory = {(network, method): _in_child(network, method) for network in networks for method in METHODS}
    for network in networks:
        times = seconds(network)
        for method in METHODS:
            used, plain = memory[network, method], memory[network, "gradient"]
            sys.stdout.write(
                f"{network:12} {method:12} {1000 * times[method]:8.1f} ms {times[method] / times['gradient']:5.2f}x "
                f"{used:7.0f} MiB {used / plain:5.2f}x\n"
            )
            sys.stdout.flush()


def _in_child(network: str, method: str) -> float:
    command = [sys.executable, __file__, "--peak", network, method]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


if __name__ == "__main__":
    main()
