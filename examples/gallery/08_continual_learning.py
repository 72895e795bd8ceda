"""
Learning one task after another
===============================

A network that learns new digits forgets the old ones. Elastic weight consolidation keeps weights in
place that the old loss is curved in: its penalty is ½ λ Σ h (θ − θ*)², with the diagonal h of the
old task's Hessian or Fisher matrix.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from hesscale.applications.consolidation import EWC

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
places = [torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
TASKS = [images[:, order] for order in places]  # the same digits with their pixels shuffled
STEPS, EVERY = 120, 10


# %%
# Three tasks in a row. All that consolidation adds to the loop is ``+ ewc()``, and a line between tasks.
def forgetting(strength: float) -> torch.Tensor:
    """The accuracy on each task (rows) while all of them are learned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    ewc = EWC(model, strength=strength)
    rows = []
    for inputs in TASKS:
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for step in range(STEPS):
            chosen = torch.randint(len(labels), (128,))
            optimizer.zero_grad()
            (F.cross_entropy(model(inputs[chosen]), labels[chosen]) + ewc()).backward()
            optimizer.step()
            if step % EVERY == 0:
                with torch.no_grad():
                    rows.append([float((model(x).argmax(1) == labels).float().mean()) for x in TASKS])
        ewc.consolidate(F.cross_entropy, [(inputs, labels)], method="hesscale_gn")
    return torch.tensor(rows).T


# %%
# Without the penalty the first task is lost as soon as the second begins.
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for axis, strength in zip(axes, (0.0, 3000.0), strict=True):
    for number, accuracy in enumerate(forgetting(strength), start=1):
        axis.plot(torch.arange(len(accuracy)) * EVERY, accuracy, label=f"task {number}")
    for border in (STEPS, 2 * STEPS):
        axis.axvline(border, color="gray", linewidth=0.8, linestyle=":")
    axis.set(title=f"λ = {strength:g}", xlabel="step")
axes[0].set_ylabel("accuracy")
axes[0].legend()
plt.show()
