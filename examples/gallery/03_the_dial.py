"""
The dial: rank= from HesScale to Gauss-Newton
=============================================

HesScale keeps of the loss's own curvature only the diagonal. ``rank=k`` carries its k leading
eigenvectors beside the diagonal, each for one more product per layer. On trained networks, a few of
them take most of the error away.
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
batch = (images[:256], labels[:256])
RANKS = (0, 1, 2, 3, 5, 7, "full")


def network(activation: type[nn.Module]) -> nn.Module:
    """Three layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 24), activation(), nn.Linear(24, 24), activation(), nn.Linear(24, 10))


def train(model: nn.Module, steps: int) -> None:
    """Adam on all of the digits."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def errors(model: nn.Module) -> list[float]:
    """Σ|estimate − exact| / Σ|exact| over all parameters, for each rank."""
    exact = hesscale.estimate("hessian", model, F.cross_entropy, batch)
    total = sum(float(s.abs().sum()) for s in exact.values())
    result = []
    for rank in RANKS:
        found = hesscale.estimate("hesscale", model, F.cross_entropy, batch, rank=rank)
        result.append(sum(float((found[name] - exact[name]).abs().sum()) for name in exact) / total)
    return result


# %%
# A network with tanh and one with ReLU, before and after training.
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for activation, color in ((nn.Tanh, "tab:blue"), (nn.ReLU, "tab:orange")):
    for steps, style in ((0, "--"), (60, "-")):
        model = network(activation)
        train(model, steps)
        label = f"{activation.__name__}, {'trained' if steps else 'untrained'}"
        axis.plot([str(rank) for rank in RANKS], errors(model), style, color=color, marker="o", label=label)
axis.set(xlabel="rank", ylabel="error relative to |diag H|", ylim=(0, None))
axis.legend()
plt.show()
