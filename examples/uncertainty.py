"""A Laplace posterior over a trained network: as right as before, and less sure where it has seen nothing."""

import torch
import torch.nn.functional as F
from torch import nn

from hesscale.applications.laplace import laplace

torch.manual_seed(0)
x = torch.randn(400, 8)
y = x[:, :4].argmax(1)
batches = [*zip(x.split(100), y.split(100), strict=True)]
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(100):
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

posterior = laplace(model, F.cross_entropy, batches).with_likeliest_prior()
far = 10 * torch.randn(400, 8)
with torch.no_grad():
    print(f"sure of far inputs: the network {model(far).softmax(-1).amax(1).mean():.3f}", end=", ")
print(f"its posterior {posterior.predict(far).amax(1).mean():.3f}")
accuracy = (posterior.predict(x).argmax(1) == y).float().mean().item()
print(f"accuracy {accuracy:.3f}")
