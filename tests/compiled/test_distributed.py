"""Two processes with half a batch each train a compiled model as one process trains it with the whole batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

import hesscale
from hesscale.compiled.region import Region

from ..processes import together
from .networks import compiled

WIDE = 400
"""Entries of a matrix of this size fill a bucket, which DDP makes no smaller than a megabyte."""


class Block(nn.Module):
    """A layer of its own: a plain ``Sequential`` torch leaves alone where its own ``compile`` is called."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.linear(x)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(4, WIDE), Block(WIDE, WIDE), Block(WIDE, 3)).double()


def with_compiled_blocks() -> nn.Sequential:
    model = network()
    for block in model:
        block.compile(backend="hesscale", options={"backend": "aot_eager"})
    return model


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "ddp of a compiled model": lambda: DistributedDataParallel(compiled(network())),
    "ddp that is compiled": lambda: compiled(DistributedDataParallel(network(), bucket_cap_mb=1)),
    "fsdp of compiled blocks": lambda: sharded(with_compiled_blocks()),
    "fsdp that is compiled": lambda: compiled(sharded(network())),
}
"""Each has several regions: in DDP Dynamo splits the graph where a bucket of gradients is full."""


def train(model: Any, optimizer: Any, rank: int = 0, count: int = 1) -> list[Tensor]:
    """The parameters after four steps of two micro-batches each, in one of two ways in turn."""
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)[rank::count]
        y = torch.randint(3, (8,), generator=generator)[rank::count]
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = F.cross_entropy(model(a), b) / 2
            if step % 2:
                with optimizer.armed():
                    loss.backward()
            else:
                optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    whole: list[Any] = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in whole]


def run_all(rank: int, folder: Path) -> None:
    with together(rank, folder / "meeting"):
        results, build, regions = {}, Region.__init__, []

        def counted(*args: Any) -> None:
            regions.append(1)
            build(*args)

        Region.__init__ = counted  # type: ignore[method-assign]
        for name, make in CASES.items():
            torch._dynamo.reset()
            regions.clear()
            model = make()
            optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, every=2)
            hesscale.distributed.synchronize(optimizer, getattr(model, "_orig_mod", model))
            results[name] = train(model, optimizer, rank, dist.get_world_size()), len(regions)
        if rank == 0:
            torch.save(results, folder / "results")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("processes")
    spawn(run_all, (folder,), nprocs=2)
    return torch.load(folder / "results")


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(results: Any, name: str) -> None:
    model = network()
    found, regions = results[name]
    expected = train(model, hesscale.AdaHesScale(model.parameters(), lr=0.01, every=2))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert regions > 1
