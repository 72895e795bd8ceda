"""A compiled training loop: forward, gradient and curvature are one graph of torch's compiler.

``python compiled_loop.py`` compiles with Inductor, which takes some seconds and a C++ compiler; ``aot_eager`` as an
argument does without.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and beside it what is to be looked at."""
    logits = model(x)
    return F.cross_entropy(logits, y), logits


optimizer = hesscale.AdaHesScale(model.parameters(), lr=3e-3, every=2)
step = optimizer.compile(loss_fn, model, backend=sys.argv[1] if len(sys.argv) > 1 else "inductor")

for _ in range(20):
    correct = 0
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss, logits = step(x[batch], y[batch])  # fills p.grad, and p.curvature when it is due
        optimizer.step()
        correct += int((logits.argmax(1) == y[batch]).sum())

print(f"{step.compilations} graphs, accuracy {correct / len(x):.3f}")
