"""Two processes with half a batch each against one with the whole batch, on CPU; and a training that is killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing import ProcessExitedException, spawn
from torch.nn.parallel import DistributedDataParallel

import hesscale
from hesscale.applications.step_size import TrustRegion
from hesscale.optim import CurvatureScaled

from .processes import together

PROCESSES = 2
STEPS = 5
TOLERANCE = 1e-9


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.GELU()),
        nn.Sequential(nn.Flatten(), nn.Linear(48, 7), nn.LayerNorm(7), nn.GELU()),  # 7: shards of different size
        nn.Linear(7, 3),
    ).double()


def train(
    model: nn.Module,
    optimizer: CurvatureScaled,
    *,
    rank: int,
    steps: range,
    micro_batches: int = 1,
    attach: bool = False,
    delay: bool = False,
) -> None:
    count = dist.get_world_size() if dist.is_initialized() else 1
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64)[rank::count]
        y = torch.randint(3, (8,), generator=generator)[rank::count]
        optimizer.zero_grad()
        for index, (a, b) in enumerate(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)):
            if delay and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(index == micro_batches - 1)
            loss = F.cross_entropy(model(a), b) / micro_batches
            if attach:
                optimizer.attach(loss).backward()
            else:
                optimizer.backward(loss)
        optimizer.step()


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def replicated_with_unused(model: nn.Module) -> nn.Module:
    model.register_parameter("idle", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return DistributedDataParallel(model, find_unused_parameters=True)


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def limited(params: Any, lr: float, **options: Any) -> TrustRegion:
    return TrustRegion(torch.optim.Adam(params, lr=lr), 1e-6, **options)


Wrap = Callable[[nn.Module], nn.Module]
CASES: dict[str, tuple[Wrap, Any, dict[str, Any], dict[str, Any]]] = {
    "ddp": (replicated, hesscale.AdaHesScale, {"weight_decay": 0.1}, {}),
    "ddp, Gauss-Newton, every, trust region": (
        replicated,
        hesscale.AdaHesScaleGN,
        {"every": 2, "trust_region": 1e-3},
        {"micro_batches": 2},
    ),
    "ddp, unused parameter, attached": (replicated_with_unused, hesscale.AdaHesScale, {}, {"attach": True}),
    "fsdp": (sharded, hesscale.AdaHesScale, {"weight_decay": 0.1}, {}),
    "fsdp, every, trust region": (
        sharded,
        hesscale.AdaHesScale,
        {"every": 2, "trust_region": 1e-3, "foreach": True},
        {"micro_batches": 2},
    ),
    "fsdp, Gauss-Newton, attached": (sharded, hesscale.AdaHesScaleGN, {}, {"micro_batches": 2, "attach": True}),
    "fsdp, gradients reduced with the last micro-batch": (
        sharded,
        hesscale.AdaHesScale,
        {"weight_decay": 0.1},
        {"micro_batches": 4, "delay": True},
    ),
    "ddp, Adam in a trust region": (replicated, limited, {"every": 2}, {"micro_batches": 2}),
    "fsdp, Adam in a trust region": (sharded, limited, {}, {}),
}
WITHOUT_A_LINE = "fsdp, Gauss-Newton, attached"
"""Most cases call ``synchronize``, which sharded parameters can do without."""


def build(name: str) -> tuple[nn.Module, CurvatureScaled]:
    wrap, preset, options, _ = CASES[name]
    model = wrap(network())
    optimizer: CurvatureScaled = preset(model.parameters(), lr=0.01, **options)
    if name != WITHOUT_A_LINE:
        hesscale.distributed.synchronize(optimizer, model)
    return model, optimizer


def whole(model: nn.Module) -> list[Tensor]:
    found = []
    for name, p in model.named_parameters():
        if "idle" not in name:
            full: Any = p.detach()
            found.append((full.full_tensor() if hasattr(full, "full_tensor") else full).clone())
    return found


def alone(name: str) -> list[Tensor]:
    _, preset, options, flow = CASES[name]
    model = network()
    train(model, preset(model.parameters(), lr=0.01, **options), rank=0, steps=range(STEPS), **flow)
    return whole(model)


def run_all(rank: int, folder: Path) -> None:
    """Trains every case, then is killed in the middle of one."""
    with together(rank, folder / "first"):
        results: dict[str, Any] = {}
        for name, (*_, flow) in CASES.items():
            model, optimizer = build(name)
            train(model, optimizer, rank=rank, steps=range(STEPS), **flow)
            results[name] = whole(model)
        results["messages"] = messages_by_step(rank)
        results["drift"] = drift_of_sampled(rank)
        results["alone"] = errors_without_the_line(rank)
        results["zero_grad"] = curvature_after_zero_grad(rank)
        if rank == 0:
            torch.save(results, folder / "results")
        for name in ("ddp", "fsdp"):
            model, optimizer = build(name)
            train(model, optimizer, rank=rank, steps=range(3))
            saved = get_state_dict(model, optimizer)
            torch.save(saved, folder / f"{name} {rank}")
            train(model, optimizer, rank=rank, steps=range(3, 4))
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def messages_by_step(rank: int) -> list[int]:
    """How often a step with ``every=2`` talks about curvature: the count of who has any, and one message."""
    model = replicated(network())
    optimizer = hesscale.AdaHesScale(model.parameters(), every=2)
    hesscale.distributed.synchronize(optimizer, model)
    original, calls, found = dist.all_reduce, [], []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*arguments, **options)

    dist.all_reduce = counted
    for step in range(4):
        calls.clear()
        train(model, optimizer, rank=rank, steps=range(step, step + 1))
        found.append(len(calls))
    dist.all_reduce = original
    return found


def drift_of_sampled(rank: int) -> float:
    """How far apart the processes are after training with curvature sampled in each."""
    worst = 0.0
    for preset in (hesscale.AdaHessian, hesscale.AdaGGNMC):
        model = replicated(network())
        torch.manual_seed(rank)
        optimizer = preset(model.parameters(), lr=1e-4)
        hesscale.distributed.synchronize(optimizer, model)
        train(model, optimizer, rank=rank, steps=range(2))
        for p in whole(model):
            low, high = p.clone(), p.clone()
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
            worst = max(worst, float((high - low).max()))
    return worst


def errors_without_the_line(rank: int) -> list[str]:
    """What the first step says where nothing averages curvature, and whether it has changed a parameter."""
    found = []
    for wrap in (replicated, replicated_with_unused):
        model = wrap(network())
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
        before = whole(model)
        try:
            train(model, optimizer, rank=rank, steps=range(1))
        except RuntimeError as error:
            found.append(str(error))
        assert all(map(torch.equal, whole(model), before))
    return found


def curvature_after_zero_grad(rank: int) -> list[Tensor]:
    """Of the second of two passes with model.zero_grad() between them, which the optimizer does not see."""
    model = sharded(network())
    hesscale.AdaHesScale(model.parameters())
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64)[rank::PROCESSES]
        y = torch.randint(3, (8,), generator=generator)[rank::PROCESSES]
        model.zero_grad()
        hesscale.backward(F.cross_entropy(model(x), y))
    return [p.curvature.full_tensor() for p in model.parameters()]


def resume(rank: int, folder: Path) -> None:
    with together(rank, folder / "second"):
        results = {}
        for name in ("ddp", "fsdp"):
            model, optimizer = build(name)
            state, optimizer_state = torch.load(folder / f"{name} {rank}", weights_only=False)
            set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
            train(model, optimizer, rank=rank, steps=range(3, STEPS))
            results[name] = whole(model)
        if rank == 0:
            torch.save(results, folder / "resumed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    with pytest.raises(ProcessExitedException):
        spawn(run_all, (folder,), nprocs=PROCESSES)
    found: dict[str, Any] = torch.load(folder / "results")
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(results: dict[str, Any], name: str) -> None:
    torch.testing.assert_close(results[name], alone(name), rtol=TOLERANCE, atol=TOLERANCE)


def test_nothing_is_sent_when_curvature_is_not_due(results: dict[str, Any]) -> None:
    assert results["messages"] == [2, 2, 2, 0]


def test_copies_stay_together_with_sampled_curvature(results: dict[str, Any]) -> None:
    assert results["drift"] == 0.0


def test_without_the_line_the_first_step_gives_it(results: dict[str, Any]) -> None:
    assert len(results["alone"]) == 2
    for message in results["alone"]:
        assert message.startswith("2 processes are training")
        assert "call hesscale.distributed.synchronize(optimizer, model) once before training" in message


def test_curvature_of_shards_belongs_to_their_gradients(results: dict[str, Any]) -> None:
    model = network()
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64),
        torch.randint(3, (8,), generator=generator),
    )
    hesscale.backward(F.cross_entropy(model(x), y))
    expected = [p.curvature for p in model.parameters()]
    torch.testing.assert_close(results["zero_grad"], expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_killed_training_continues_where_it_was(results: dict[str, Any], folder: Path) -> None:
    spawn(resume, (folder,), nprocs=PROCESSES)
    resumed = torch.load(folder / "resumed")
    for name in ("ddp", "fsdp"):
        torch.testing.assert_close(resumed[name], results[name], rtol=0, atol=0)
