"""What a step of a task costs with each optimizer, relative to Adam's: interleaved, on batches of random data.

Training runs measure seconds too, but one after the other, and a machine is not the same machine an hour later.

$ python -m benchmarks.step_prices mnist-mlp cifar10-3c3d --rounds 15
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from hesscale_lab.optimizers import backward, kernels_for, make_optimizer
from hesscale_lab.options import Options, label
from hesscale_lab.tasks.table import task_named

BASELINE = ("AdamFused", ())
CONFIGURATIONS: tuple[tuple[str, Options], ...] = (
    BASELINE,
    ("SGD", ()),
    *(
        (name, options)
        for name in ("AdaHesScale", "AdaHesScaleGN")
        for options in ((), (("every", 10),), (("every", 20),))
    ),
    ("AdaHesScale", (("bound", 1.0), ("every", 10))),
    ("AdaHessian", ()),
    ("AdaGGNMC", ()),
)
SHAPES: Mapping[str, tuple[int, ...]] = {
    "mnist-mlp": (1, 28, 28),
    "cifar10-3c3d": (3, 32, 32),
    "cifar100-3c3d": (3, 32, 32),
}
STEPS = 20  # of a round: a whole number of periods of every=


def step_of(task_name: str, optimizer_name: str, options: Options) -> Callable[[], None]:
    """A function that trains for one step, as the lab does."""
    task = task_named(task_name)
    generator = torch.Generator().manual_seed(0)
    model = task.make(generator).train()
    optimizer = make_optimizer(
        optimizer_name, model, lr=1e-5, betas=(0.9, 0.999), weight_decay=task.weight_decay, fused=True, options=options
    )
    x = torch.rand(task.batch, *SHAPES[task_name], generator=generator)
    y = torch.randint(10, (task.batch,), generator=generator)

    def step() -> None:
        with kernels_for(optimizer_name):
            outputs = model(x)
        optimizer.zero_grad()
        backward(optimizer, task.loss(outputs, y), generator=generator)
        optimizer.step()

    return step


def measured(task: str, rounds: int) -> Mapping[str, list[float]]:
    """Milliseconds per step of every configuration, round by round."""
    steps = {label(name, options): step_of(task, name, options) for name, options in CONFIGURATIONS}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            found[name].append((time.perf_counter() - begin) / STEPS * 1e3)
    return {name: values[1:] for name, values in found.items()}  # the first one warms up


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for task in chosen.tasks:
        times = measured(task, chosen.rounds)
        base = times[label(*BASELINE)]
        print(f"\n{task}, {chosen.rounds} rounds of {STEPS} steps\n")
        print("| optimizer | ms/step | relative to Adam, fused | quartiles |")
        print("|---|---:|---:|---|")
        for name, values in times.items():
            low, middle, high = statistics.quantiles([a / b for a, b in zip(values, base, strict=True)], n=4)
            print(f"| {name} | {statistics.median(values):.2f} | {middle:.2f} | {low:.2f} … {high:.2f} |", flush=True)


if __name__ == "__main__":
    main()
