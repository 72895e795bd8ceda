"""Lightning: it calls backward itself, so ``training_step`` hands it a loss that the optimizer is attached to.

``python lightning_trainer.py inductor`` (or ``aot_eager``, without a C++ compiler) compiles the network.
"""

import sys

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hesscale


class Classifier(lightning.LightningModule):
    """A small network with its training step and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of one batch, so attached that the backward pass to come fills ``p.curvature``."""
        x, y = batch
        return self.optimizer.attach(F.cross_entropy(self.network(x), y))

    def configure_optimizers(self) -> hesscale.AdaHesScale:
        """With several processes, also call ``hesscale.distributed.synchronize(optimizer, self)`` here."""
        self.optimizer = hesscale.AdaHesScale(self.parameters(), lr=1e-2)
        return self.optimizer


lightning.seed_everything(0, verbose=False)
x = torch.randn(512, 8)
y = x[:, :4].argmax(1)
model = Classifier()
if len(sys.argv) > 1:
    model.network = torch.compile(model.network, backend="hesscale", options={"backend": sys.argv[1]})
trainer = lightning.Trainer(
    max_epochs=15,
    accelerator="cpu",
    gradient_clip_val=1.0,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

accuracy = (model.network(x).argmax(1) == y).float().mean().item()
print(f"accuracy {accuracy:.3f}")
