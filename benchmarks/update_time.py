"""Milliseconds of one optimizer step, without the backward pass, in all forms of the update, beside torch's Adam.

    python benchmarks/update_time.py [--threads 1] [--rounds 40]

Medians over rounds in which all optimizers take turns.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

import hesscale

SHAPES = {"16 matrices of 512 × 512": [(512, 512)] * 16, "20 layers of 64 × 64": [(64, 64), (64,)] * 20}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def step_time(optimizer: torch.optim.Optimizer, params: list[Tensor], curvatures: list[Tensor]) -> float:
    """Milliseconds."""
    for p, h in zip(params, curvatures, strict=True):
        p.curvature = h
    start = time.perf_counter()
    optimizer.step()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    """Prints one table per set of shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for title, shapes in SHAPES.items():
        params = [torch.randn(shape, requires_grad=True) for shape in shapes]
        curvatures = [torch.rand_like(p) for p in params]
        for p in params:
            p.grad = torch.randn_like(p)
        kinds = (torch.optim.Adam, hesscale.AdaHesScale)
        optimizers = {(form, kind): kind(params, **FORMS[form]) for form in FORMS for kind in kinds}
        for optimizer in optimizers.values():
            step_time(optimizer, params, curvatures)  # compiles
        rounds: dict[Any, list[float]] = {key: [] for key in optimizers}
        for _ in range(arguments.rounds):
            for key, optimizer in optimizers.items():
                rounds[key].append(step_time(optimizer, params, curvatures))
        sys.stdout.write(f"\n| {title} | Adam | AdaHesScale |\n|---|---:|---:|\n")
        for form in FORMS:
            times = [statistics.median(rounds[form, kind]) for kind in kinds]
            sys.stdout.write(f"| {form} | {times[0]:.2f} | {times[1]:.2f} |\n")


if __name__ == "__main__":
    main()
