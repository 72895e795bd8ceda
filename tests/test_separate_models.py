"""Several processes, each with a model of its own: by a word, or where another model is seen to be the shared one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

import hesscale
from hesscale.applications.step_size import TrustRegion

from .processes import together
from .tensors import random

PROCESSES = 2


def train(rank: int, **options: Any) -> list[Tensor]:
    """A model that is this process's own, on data of its own."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer: Any = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    if options.get("limited"):
        optimizer = TrustRegion(torch.optim.SGD(model.parameters(), lr=0.01), 1e-4)
    if options.get("separate"):
        hesscale.distributed.separate(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(model(random(6, 4, seed=10 * rank + step)).square().mean())
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def run(rank: int, folder: Path) -> None:
    with together(rank, folder / "meeting"):
        results: dict[str, Any] = {"by a word": train(rank, separate=True)}
        with pytest.raises(RuntimeError, match=r"separate\(optimizer\) if each trains a model of its own"):
            train(rank)
        layer = nn.Linear(3, 3).double()
        fully_shard(layer, mesh=init_device_mesh("cpu", (PROCESSES,)))
        results["beside fsdp"] = train(rank)
        del layer
        actor = DistributedDataParallel(nn.Linear(3, 3).double())
        results["beside ddp"] = train(rank)
        results["beside ddp, limited"] = train(rank, limited=True)
        optimizer = hesscale.AdaHesScale(actor.parameters())
        optimizer.backward(actor(random(4, 3)).square().mean())
        with pytest.raises(RuntimeError, match=r"synchronize\(optimizer, model\)"):
            optimizer.step()
        torch.save(results, folder / f"results {rank}")
        dist.barrier()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    spawn(run, (folder,), nprocs=PROCESSES)
    return [torch.load(folder / f"results {rank}") for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", ["by a word", "beside ddp", "beside fsdp", "beside ddp, limited"])
def test_each_process_trains_as_if_it_were_alone(results: list[dict[str, Any]], case: str) -> None:
    for rank, found in enumerate(results):
        torch.testing.assert_close(found[case], train(rank, limited="limited" in case), rtol=0, atol=0)
    assert not torch.equal(results[0][case][0], results[1][case][0])
