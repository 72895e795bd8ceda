"""
HesScale against the exact diagonal
===================================

How close is the estimate? For a network of some thousand parameters the exact diagonal can be had,
at one double backward per entry. Every point is one parameter; on the line, the estimate is exact.
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
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 10)
)

# %%
# A trained network, where the approximation is worse than before training.
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(30):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()

# %%
# All by the same call, by parameter name.
batch = (images[:256], labels[:256])
exact = hesscale.estimate("hessian", model, F.cross_entropy, batch)
found = {
    "HesScale": hesscale.estimate("hesscale", model, F.cross_entropy, batch),
    "rank=3": hesscale.estimate("hesscale", model, F.cross_entropy, batch, rank=3),
}

# %%
# The last layer is exact, as always under cross-entropy. Before it, entries of the Hessian between
# units of a layer are dropped; three columns carried beside the diagonal bring most of them back.
weights = {"first convolution": "0.weight", "second convolution": "2.weight", "last layer": "5.weight"}
figure, axes = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
for axis, (title, name) in zip(axes, weights.items(), strict=True):
    true = exact[name].flatten()
    axis.plot([true.min(), true.max()], [true.min(), true.max()], color="gray", linewidth=1)
    for label, color in (("HesScale", "tab:blue"), ("rank=3", "tab:orange")):
        ours = found[label][name].flatten()
        error = float((ours - true).abs().sum() / true.abs().sum())
        axis.scatter(true, ours, s=8, alpha=0.6, color=color, label=f"{label}: error {100 * error:.0f} %")
    axis.set(title=title, xlabel="exact ∂²L/∂p²")
    axis.legend(fontsize=8)
axes[0].set_ylabel("estimate")
plt.show()
