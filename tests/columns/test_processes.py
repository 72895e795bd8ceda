"""rank= with several processes: DDP's mean is that of the whole batch; sharded models are refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

import hesscale

from ..processes import together
from .networks import LABELS, made
from .test_dial import assert_equal


def batch(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:4], LABELS[:4]


def run(process: int, folder: Path) -> None:
    with together(process, folder / "meeting"):
        model, data = made("mlp")
        x, y = (t[process::2] for t in batch(data))
        copies = DistributedDataParallel(model)
        hesscale.backward(F.cross_entropy(copies(x), y), rank=2)
        found = [p.curvature for p in model.parameters()]
        for s in found:
            dist.all_reduce(s)
        model, data = made("mlp")
        mesh = init_device_mesh("cpu", (2,))
        for layer in (*model.children(), model):
            fully_shard(layer, mesh=mesh)
        hesscale.distributed.synchronize(hesscale.AdaHesScale(model.parameters()), model)
        refusal = ""
        try:
            hesscale.backward(F.cross_entropy(model(data), LABELS), rank=1)
        except RuntimeError as error:
            refusal = str(error)
        if process == 0:
            torch.save(
                {
                    "curvature": [s / 2 for s in found],
                    "grad": [p.grad for p in copies.parameters()],
                    "refusal": refusal,
                },
                folder / "found",
            )


def test_two_processes_are_one(tmp_path: Path) -> None:
    spawn(run, (tmp_path,), nprocs=2)
    found = torch.load(tmp_path / "found")
    model, data = made("mlp")
    x, y = batch(data)
    loss = F.cross_entropy(model(x), y)
    expected = hesscale.diagonal(loss, [*model.parameters()], rank=2, retain_graph=True)
    for ours, theirs in zip(found["curvature"], expected, strict=True):
        assert theirs is not None
        assert_equal(ours, theirs)
    for ours, theirs in zip(found["grad"], torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        assert_equal(ours, theirs)
    assert "fully_shard has sharded" in found["refusal"]
