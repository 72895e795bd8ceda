"""A plain training loop: ``optimizer.backward(loss)`` in place of ``loss.backward()``, the rest as always."""

import torch
import torch.nn.functional as F
from torch import nn

import hesscale

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-2, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

for _ in range(20):
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()

accuracy = (model(x).argmax(1) == y).float().mean().item()
print(f"accuracy {accuracy:.3f}")
