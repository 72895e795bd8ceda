"""
The curvature of one's own model
================================

Three lines give the diagonal of the Hessian of a PyTorch model: a loss, ``hesscale.backward`` in
place of ``loss.backward``, and ``p.curvature`` beside ``p.grad``. Here is where a small
convolutional network is curved, and which way.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import hesscale

# %%
# Any model and any data.
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Conv2d(8, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(256, 10))

# %%
# The three lines.
loss = F.cross_entropy(model(images), labels)
hesscale.backward(loss)
curvature = {name: p.curvature for name, p in model.named_parameters() if p.dim() > 1}

# %%
# Entries of both signs: HesScale estimates the Hessian, not a positive substitute. The last layer,
# under cross-entropy, is exact and never negative.
figure, axes = plt.subplots(1, len(curvature), figsize=(9, 2.8), layout="constrained")
for axis, (name, s) in zip(axes, curvature.items(), strict=True):
    axis.hist(s.flatten(), bins=60, color="tab:blue")
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set(title=f"{name}  {tuple(s.shape)}", xlabel="∂²L/∂p²", yscale="log")
axes[0].set_ylabel("number of entries")
plt.show()
