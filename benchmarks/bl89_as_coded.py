"""What the published BL89 curve may be: the authors' code gives the logits no curvature (docs/reproduction.md).

    python benchmarks/bl89_as_coded.py --data DIR --epochs 1

Their BL89 ran as LogSoftmax and NLLLoss. Run today, that path hands on zero curvature at the logits, so the last layer
is divided by eps alone, and all layers below have only the residual of tanh.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale
from hesscale_lab.batches import Data, generator_for, load
from hesscale_lab.optimizers import best_settings
from hesscale_lab.options import EPS
from hesscale_lab.tasks.table import TASKS
from hesscale_lab.tasks.task import Task


def main() -> None:
    """Prints test loss and accuracy after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS["mnist-mlp"]
    data = load(task, seed=options.seed, folder=options.data)
    model = task.make(generator_for(options.seed, "weights"))
    averages = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    steps = 0
    for epoch in range(1, options.epochs + 1):
        for x, y in data.epoch(epoch):
            steps += 1
            step(model, x, y, averages, steps)
        print(epoch, *measure(task, model, data))


def step(model: nn.Module, x: Tensor, y: Tensor, averages: list[tuple[Tensor, Tensor]], steps: int) -> None:
    """One step of Adam's form with the curvature as coded. Entries without curvature move by m/eps, as theirs did."""
    lr, beta1, beta2 = best_settings("mnist-mlp", "AdaBL89")
    model.zero_grad()
    logits = model(x)
    with torch.no_grad():
        gradient = (logits.softmax(1) - F.one_hot(y, logits.shape[1])) / len(y)
    hesscale.backward(logits, gradient=gradient, curvature=torch.zeros_like(gradient))
    with torch.no_grad():
        for p, (m, v) in zip(model.parameters(), averages, strict=True):
            m.lerp_(p.grad, 1 - beta1)
            v.mul_(beta2).addcmul_(p.curvature, p.curvature, value=1 - beta2)
            p.sub_(lr * m / (1 - beta1**steps) / ((v / (1 - beta2**steps)).sqrt() + EPS))


@torch.no_grad()
def measure(task: Task, model: nn.Module, data: Data) -> tuple[float, float]:
    """Loss and accuracy on the test set."""
    images, labels = data.test
    logits = model(task.prepare(images))
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


if __name__ == "__main__":
    main()
