"""
Optimal brain damage: pruning by curvature
==========================================

Which weights can go? The smallest ones, says magnitude pruning; those whose loss would cost least,
½ h w² with the diagonal h of the Hessian, says optimal brain damage (LeCun et al. 1989). Both on one
small network trained on digits, without any fine-tuning.
"""

import copy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from hesscale.applications import pruning

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1200), slice(1200, None)
model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for _ in range(80):
    optimizer.zero_grad()
    F.cross_entropy(model(images[train]), labels[train]).backward()
    optimizer.step()

# %%
# One call prunes a copy of the model. A diagonal of ones makes it magnitude pruning. In one round
# curvature does worse than magnitude here: where most weights go at once, the loss is no parabola any
# more. In twenty rounds, with curvature found anew in each, it does better.
batches = [(images[train], labels[train])]
ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
WAYS = {
    "magnitude": {"diagonal": ones},
    "HesScale, one round": {},
    "rank=3, one round": {"rank": 3},
    "HesScale, 20 rounds": {"schedule": 20},
    "rank=3, 20 rounds": {"rank": 3, "schedule": 20},
}
shares = [0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95]
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for label, how in WAYS.items():
    right = []
    for share in shares:
        pruned = copy.deepcopy(model)
        pruning.prune(pruned, share, F.cross_entropy, batches, **how)
        with torch.no_grad():
            right.append(float((pruned(images[test]).argmax(1) == labels[test]).float().mean()))
    axis.plot([100 * share for share in shares], right, marker="o", label=label)
axis.set(xlabel="weights removed, %", ylabel="accuracy on held-out digits")
axis.legend()
plt.show()
