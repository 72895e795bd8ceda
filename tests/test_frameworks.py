"""Accelerate and Lightning accumulate, clip and clear gradients each in its way: steps are those of a plain loop."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.utils.data import DataLoader, TensorDataset

import hesscale

from .processes import together

PROCESSES = 2
MICRO_BATCHES = 3
SIZE = 4  # of a micro-batch, in all processes together
CLIP = 0.05


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3)).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * MICRO_BATCHES * SIZE, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (len(x),), generator=generator))


def plain() -> list[Tensor]:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(DataLoader(data(), SIZE)):
        optimizer.backward(F.cross_entropy(model(x), y) / MICRO_BATCHES)
        if index % MICRO_BATCHES == MICRO_BATCHES - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def installed(name: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def accelerated(process: int, folder: Path, view: bool) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    os.environ.update(RANK=str(process), LOCAL_RANK=str(process), WORLD_SIZE=str(PROCESSES))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # the processes have met already
    with together(process, folder / "meeting"):
        options = DistributedDataParallelKwargs(gradient_as_bucket_view=view)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES, kwargs_handlers=[options])
        assert accelerator.num_processes == PROCESSES
        model: Any = network()
        optimizer: Any = hesscale.AdaHesScale(model.parameters(), lr=0.01)
        loader: Any = DataLoader(data(), SIZE // PROCESSES)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        hesscale.distributed.synchronize(optimizer.optimizer, model)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(optimizer.optimizer.attach(F.cross_entropy(model(x), y)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        if process == 0:
            torch.save([p.detach() for p in model.parameters()], folder / "results")


@installed("accelerate")
@pytest.mark.parametrize("view", [False, True])
def test_accelerate_in_two_processes(tmp_path: Path, view: bool) -> None:
    spawn(accelerated, (tmp_path, view), nprocs=PROCESSES)
    torch.testing.assert_close(torch.load(tmp_path / "results"), plain(), rtol=1e-9, atol=1e-9)


@installed("lightning")
@pytest.mark.parametrize("armed", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_lightning(armed: bool, tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss = F.cross_entropy(self.network(batch[0]), batch[1])
            return loss if armed else self.optimizer.attach(loss)

        def configure_optimizers(self) -> hesscale.AdaHesScale:
            self.optimizer = hesscale.AdaHesScale(self.parameters(), lr=0.01)
            return self.optimizer

        def backward(self, loss: Tensor) -> None:
            if armed:
                with self.optimizer.armed():
                    loss.backward()
            else:
                loss.backward()

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=CLIP,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(), SIZE))
    torch.testing.assert_close([p.detach() for p in module.parameters()], plain(), rtol=1e-9, atol=1e-9)
