"""
HesScale against the exact diagonal
===================================

How close is the estimate? For a network of some thousand parameters the exact diagonal can be had, at one double backward per entry. Every
point is one parameter; on the line, the estimate is exact.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import hesscale

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 10))

# %%
# A trained network, where the approximation is worse than before training.
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(30):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()

# %%
# Both by the same call, by parameter name.
batch = (images[:256], labels[:256])
exact = hesscale.estimate("hessian", model, F.cross_entropy, batch)
found = hesscale.estimate("hesscale", model, F.cross_entropy, batch)

# %%
# The last layer is exact, as always under cross-entropy. Before it, entries of the Hessian between units of a layer are dropped.
weights = [name for name in exact if exact[name].dim() > 1]
figure, axes = plt.subplots(1, len(weights), figsize=(9, 3.2), layout="constrained")
for axis, name in zip(axes, weights, strict=True):
    true, ours = exact[name].flatten(), found[name].flatten()
    ends = [float(min(true.min(), ours.min())), float(max(true.max(), ours.max()))]
    axis.plot(ends, ends, color="gray", linewidth=1)
    axis.scatter(true, ours, s=9, alpha=0.6, color="tab:blue")
    error = float((ours - true).abs().sum() / true.abs().sum())
    axis.set(title=f"{name}: error {100 * error:.0f} %", xlabel="exact")
axes[0].set_ylabel("HesScale")
plt.show()
