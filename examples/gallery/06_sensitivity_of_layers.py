"""
Which layer stands rounding?
============================

Rounding the weights of a trained layer to a few bits moves them by δ and raises the loss by about Σ
gδ + ½ Σ hδ², with the diagonal h of the Hessian. One pass predicts what each layer can stand; the
picture compares it with what happens.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 16, 3, stride=2), nn.GELU(),
    nn.Flatten(), nn.Linear(144, 32), nn.GELU(), nn.Linear(32, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(60):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def loss() -> Tensor:
    """Of all digits."""
    return F.cross_entropy(model(images), labels)


def rounded(w: Tensor, bits: int) -> Tensor:
    """The nearest of 2ᵇ values with equal distances."""
    step = w.abs().max() / 2 ** (bits - 1)
    return (w / step).round() * step


# %%
# One pass for all layers; three columns beside the diagonal, since the network is trained.
optimizer.zero_grad()
hesscale.backward(loss(), rank=3)

# %%
# Each layer rounded on its own, predicted and measured.
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
with torch.no_grad():
    before = float(loss())
    for name, w in model.named_parameters():
        if w.dim() == 1:
            continue
        predicted, measured = [], []
        kept = w.clone()
        for bits in (2, 3, 4, 5):
            delta = rounded(kept, bits) - kept
            predicted.append(float((w.grad * delta).sum() + (w.curvature * delta.square()).sum() / 2))
            w.copy_(kept + delta)
            measured.append(float(loss()) - before)
            w.copy_(kept)
        axis.plot(predicted, measured, marker="o", label=name)
        for x, y, bits in zip(predicted, measured, (2, 3, 4, 5), strict=True):
            axis.annotate(f"{bits}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
ends = axis.get_xlim()
axis.plot(ends, ends, color="gray", linewidth=1)
axis.set(xlabel="predicted rise of the loss", ylabel="measured", xscale="symlog", yscale="symlog")
for scale in (axis.set_xscale, axis.set_yscale):
    scale("symlog", linthresh=1e-4)
axis.legend(title="layer (points: bits)")
plt.show()
