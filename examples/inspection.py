"""A look at a network, as a table; ``hesscale inspect examples/inspection.py:make`` makes a page of it."""

import torch
import torch.nn.functional as F
from torch import nn

from hesscale import applications

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
batches = [*zip(x.split(64), y.split(64), strict=True)]


def make():
    """What the command line asks for: a trained model, its loss, and batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model, F.cross_entropy, batches


found = applications.inspect(*make(), rank=1)
print(found)
print("keep at more bits:", found.most_sensitive[0].name)
print(f"accuracy {(model(x).argmax(1) == y).float().mean().item():.3f}")
