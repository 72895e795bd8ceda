"""Accelerate: ``accelerator.backward`` runs the pass, so it gets an attached loss; with gradient accumulation."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hesscale

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :4].argmax(1)
network = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(
    network,
    hesscale.AdaHesScale(network.parameters(), lr=1e-2),
    DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True),
)
if accelerator.num_processes > 1:
    hesscale.distributed.synchronize(optimizer.optimizer, model)

for _ in range(15):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(optimizer.optimizer.attach(loss))
            optimizer.step()
            optimizer.zero_grad()

with torch.no_grad():
    accuracy = (model(x.to(accelerator.device)).argmax(1).cpu() == y).float().mean().item()
accelerator.print(f"accuracy {accuracy:.3f}")
