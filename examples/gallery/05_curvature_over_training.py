"""
A map of curvature over training
================================

Where is a network curved, and when? The mean size of the Hessian's diagonal, parameter by
parameter, while a CNN and a transformer learn digits. One more backward pass at each point of the
map; the training itself is plain Adam.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
STEPS, EVERY = 150, 10

# %%
# Two models. The transformer reads an image as eight rows.


class Rows(nn.Module):
    """A transformer whose words are the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 32)
        self.place = nn.Parameter(0.1 * torch.randn(8, 32))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.read(x) + self.place).mean(1))


torch.manual_seed(0)
cnn = nn.Sequential(
    nn.Unflatten(1, (1, 8)),
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
    nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Flatten(), nn.Linear(144, 10),
)  # fmt: skip
MODELS = {"CNN": cnn, "transformer": Rows()}


# %%
# Every few steps, one diagonal, by parameter name, that touches no ``.grad``.
def curvature_map(model: nn.Module) -> dict[str, list[float]]:
    """By parameter name, the mean size of curvature over training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    found: dict[str, list[float]] = {name: [] for name, p in model.named_parameters() if p.dim() > 1}
    for step in range(STEPS):
        chosen = torch.randint(len(labels), (128,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        if step % EVERY == 0:
            diagonal = hesscale.diagonal(loss, model, retain_graph=True)
            for name, sizes in found.items():
                sizes.append(float(diagonal[name].abs().mean()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


figure, axes = plt.subplots(2, 1, figsize=(8, 5.5), height_ratios=(1, 3), layout="constrained")
for axis, (title, model) in zip(axes, MODELS.items(), strict=True):
    found = curvature_map(model)
    picture = axis.imshow(torch.tensor(list(found.values())).log10(), aspect="auto", extent=(0, STEPS, len(found), 0))
    axis.set(title=title, yticks=[i + 0.5 for i in range(len(found))], yticklabels=found, xlabel="step")
    figure.colorbar(picture, ax=axis, label="log₁₀ |∂²L/∂p²|")
plt.show()
