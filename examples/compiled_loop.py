"""A compiled training loop: ``torch.compile(model, backend="hesscale")`` is one more line, and the rest a plain loop.

``python compiled_loop.py`` compiles with Inductor, which takes some seconds and a C++ compiler; ``aot_eager`` as an
argument does without.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import hesscale

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"
compiled = torch.compile(model, backend="hesscale", options={"backend": backend})
optimizer = hesscale.AdaHesScale(model.parameters(), lr=3e-3, every=2)

for _ in range(20):
    for batch in torch.randperm(len(x)).split(64):
        loss = F.cross_entropy(compiled(x[batch]), y[batch])
        optimizer.zero_grad()
        optimizer.backward(loss)  # fills p.grad, and p.curvature when it is due
        optimizer.step()

model.eval()
with torch.no_grad():
    accuracy = (model(x).argmax(1) == y).float().mean().item()
print(f"accuracy {accuracy:.3f}")
