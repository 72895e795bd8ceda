"""Fine-tuning: the lower layers are frozen, a new head is trained, then everything at a lower rate."""

import torch
import torch.nn.functional as F
from torch import nn

import hesscale

torch.manual_seed(0)
x = torch.randn(512, 8)
old_task, new_task = (x[:, 0] > 0).long(), (x[:, :3].argmax(1))
body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())


def train(model: nn.Module, optimizer: hesscale.AdaHesScaleGN, y: torch.Tensor, epochs: int) -> float:
    """The accuracy afterwards."""
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            optimizer.backward(F.cross_entropy(model(x[batch]), y[batch]))
            optimizer.step()
    return (model(x).argmax(1) == y).float().mean().item()


old = nn.Sequential(body, nn.Linear(64, 2))
train(old, hesscale.AdaHesScaleGN(old.parameters(), lr=1e-3), old_task, epochs=5)

new = nn.Sequential(body, nn.Linear(64, 3))
body.requires_grad_(False)  # no curvature is computed for what is frozen
optimizer = hesscale.AdaHesScaleGN(new[1].parameters(), lr=3e-3)
print(f"head only: accuracy {train(new, optimizer, new_task, epochs=5):.3f}")

body.requires_grad_(True)
optimizer.add_param_group({"params": body.parameters(), "lr": 1e-3})
print(f"all layers: accuracy {train(new, optimizer, new_task, epochs=10):.3f}")
