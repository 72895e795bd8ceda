"""A network without 80 % of its weights: curvature says which, three rounds of fine-tuning mend the rest."""

import torch
import torch.nn.functional as F
from torch import nn

from hesscale.applications import pruning

torch.manual_seed(0)
x = torch.randn(1024, 8)
y = x[:, :4].argmax(1)
batches = [*zip(x.split(64), y.split(64), strict=True)]


def network() -> nn.Module:
    """8-64-64-4."""
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def train(model: nn.Module, epochs: int = 5) -> None:
    """As always: masks hold by themselves."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


model = network()
train(model, epochs=20)
lost = pruning.prune(model, 0.8, F.cross_entropy, batches, rank=1, schedule=3, fine_tune=train)
print(lost)

fresh = network()  # as in another process, from a file
pruning.load_pruned(fresh, model.state_dict())
accuracy = (fresh(x).argmax(1) == y).float().mean().item()
print(f"accuracy {accuracy:.3f}")
