"""
AdaHesScale on digits
=====================

The optimizer beside AdamW and AdaHessian, on scikit-learn's digits, each at three step sizes. One
line of the training loop differs: ``optimizer.backward(loss)`` in place of ``loss.backward()``.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import hesscale

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
EPOCHS, BATCH = 8, 64
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, (1e-3, 3e-3, 1e-2), {}),
    "AdaHessian": (hesscale.AdaHessian, (1e-2, 5e-2, 0.15), {"eps": 1e-4, "bound": None}),
    "AdaHesScale": (hesscale.AdaHesScale, (1e-3, 3e-3, 1e-2), {}),
}


# %%
# The loop. ``backward`` is the optimizer's own where it has one.
def losses(kind, lr: float, options: dict) -> list[float]:
    """The training loss after each epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = kind(model.parameters(), lr=lr, **options)
    backward = getattr(optimizer, "backward", torch.Tensor.backward)
    result = []
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            backward(loss)
            optimizer.step()
        with torch.no_grad():
            result.append(float(F.cross_entropy(model(images), labels)))
    return result


# %%
# Which is best depends on the task; the site's section on evidence has the paper's tasks, with
# tuned settings and the losses.
figure, axes = plt.subplots(1, len(OPTIMIZERS), figsize=(9, 3.2), sharey=True, layout="constrained")
for axis, (name, (kind, lrs, options)) in zip(axes, OPTIMIZERS.items(), strict=True):
    for lr, color in zip(lrs, ("tab:cyan", "tab:blue", "tab:purple"), strict=True):
        axis.plot(range(1, EPOCHS + 1), losses(kind, lr, options), color=color, marker="o", label=f"lr {lr:g}")
    axis.set(title=name, xlabel="epoch", yscale="log")
    axis.legend()
axes[0].set_ylabel("training loss")
plt.show()
