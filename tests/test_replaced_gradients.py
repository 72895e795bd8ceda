"""Curvature stays with its gradient whoever scales, moves or replaces that, and starts afresh where it is cleared."""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

import hesscale

from .processes import together
from .tensors import assert_close, bowl, leaf, random

PROCESSES = 2
STEPS = 4
MICRO_BATCHES = 3

Waits = Callable[[int], AbstractContextManager[None]]


def at_once(step: int) -> AbstractContextManager[None]:
    return nullcontext()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train(model: nn.Module, *, rank: int = 0, count: int = 1, set_to_none: bool = True, waits: Waits = at_once) -> Any:
    """All parameters after each step. Before one, a pass is thrown away by the model's ``zero_grad``."""
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    if count > 1:
        hesscale.distributed.synchronize(optimizer, model)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 6, generator=generator, dtype=torch.float64)[rank::count]
        y = torch.randint(3, (12,), generator=generator)[rank::count]
        if step == 2:
            optimizer.backward(1e6 * F.cross_entropy(model(x), y))
        model.zero_grad(set_to_none=set_to_none)
        for index, (a, b) in enumerate(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)):
            with waits(step) if index < MICRO_BATCHES - 1 else nullcontext():
                optimizer.backward(F.cross_entropy(model(a), b) / MICRO_BATCHES)
        optimizer.step()
        found.append([whole(p) for p in model.parameters()])
    return found


def whole(p: Any) -> Tensor:
    found: Tensor = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
    return found


CASES = {
    **{
        f"ddp, view {view}, static {static}, unused {unused}, to none {none}": (view, static, unused, none)
        for view, static, unused, none in itertools.product((False, True), repeat=4)
        if not (static and unused)
    },
    **{f"fsdp, delayed {delayed}, to none {none}": (delayed, none) for delayed in (0, 1) for none in (False, True)},
}


def run(rank: int, folder: Path) -> None:
    with together(rank, folder / "meeting"):
        results: dict[str, Any] = {}
        for name, case in CASES.items():
            build = replicated if name.startswith("ddp") else sharded
            model, waits = build(*case[:-1])
            results[name] = train(model, rank=rank, count=PROCESSES, set_to_none=bool(case[-1]), waits=waits)
        if rank == 0:
            torch.save(results, folder / "results")


def replicated(view: bool, static: bool, unused: bool) -> tuple[nn.Module, Waits]:
    options = {"gradient_as_bucket_view": view, "static_graph": static, "find_unused_parameters": unused}
    model = DistributedDataParallel(network(), **options)  # type: ignore[arg-type]
    # torch wants the first step of a static graph synchronized
    return model, lambda step: nullcontext() if static and not step else model.no_sync()


def sharded(delayed: bool) -> tuple[nn.Module, Waits]:
    model: Any = network()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (PROCESSES,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)))

    class Delayed(nullcontext[None]):
        def __enter__(self) -> None:
            model.set_requires_gradient_sync(False)

        def __exit__(self, *_: object) -> None:
            model.set_requires_gradient_sync(True)

    return model, lambda step: Delayed() if delayed else nullcontext()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("processes")
    spawn(run, (folder,), nprocs=PROCESSES)
    found: dict[str, Any] = torch.load(folder / "results")
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_steps_of_two_processes_equal_those_of_one(results: dict[str, Any], name: str) -> None:
    torch.testing.assert_close(results[name], train(network()), rtol=1e-9, atol=1e-9)


def halved(w: Any) -> None:
    w.grad = w.grad / 2


def copied(w: Any) -> None:
    w.grad = w.grad.clone()


def unscaled(w: Any) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([w]))


def clipped(w: Any) -> None:
    nn.utils.clip_grad_norm_([w], 1e-9)
    nn.utils.clip_grad_value_([w], 1e-10)


def viewed(w: Any) -> None:
    """As DDP does by ``gradient_as_bucket_view``."""
    bucket = torch.zeros(w.numel() + 3, dtype=w.dtype)
    view = bucket[2:-1].view_as(w)
    w.grad = view.copy_(w.grad)


def moved(w: Any) -> None:
    w.data, w.grad.data = w.data.clone(), w.grad.data.clone()


def made_sparse(w: Any) -> None:
    w.grad = w.grad.to_sparse()


@pytest.mark.parametrize("change", [halved, copied, unscaled, clipped, viewed, moved, made_sparse])
def test_a_gradient_that_is_changed_keeps_its_curvature(change: Callable[[Any], None]) -> None:
    w = nn.Parameter(random(2, 3))
    once = [hesscale.diagonal(bowl(w, seed), w)[0] for seed in range(3)]
    hesscale.backward(bowl(w, 0))
    change(w)
    hesscale.backward(bowl(w, 1))
    change(w)
    bowl(w, 0).backward()
    hesscale.backward(bowl(w, 2))
    assert_close(w.curvature, sum(once))


def set_to_none(w: Any) -> None:
    w.grad = None


def zeroed(w: Any) -> None:
    w.grad.zero_()


def zeroed_with_others(w: Any) -> None:
    torch.optim.SGD([w]).zero_grad(set_to_none=False)


def replaced_by_zeros(w: Any) -> None:
    w.grad = None
    w.grad = torch.zeros_like(w)


CLEARING = [set_to_none, zeroed, zeroed_with_others, replaced_by_zeros]


@pytest.mark.parametrize("clear", CLEARING)
@pytest.mark.parametrize("change", [None, halved, unscaled, clipped, viewed])
def test_a_gradient_that_is_cleared_has_no_curvature(clear: Callable[[Any], None], change: Any) -> None:
    w = nn.Parameter(random(2, 3))
    (once,) = hesscale.diagonal(bowl(w, 1), w)
    for _ in range(3):
        hesscale.backward(bowl(w, 0))
        if change:
            change(w)
        clear(w)
        hesscale.backward(bowl(w, 1))
        assert_close(w.curvature, once)
        clear(w)
        bowl(w, 0).backward()  # a plain one clears it as well
        assert w.curvature is None
        hesscale.backward(bowl(w, 1))
        assert_close(w.curvature, once)


@pytest.mark.parametrize("clear", CLEARING)
@pytest.mark.parametrize("preset", [hesscale.AdaHesScale, hesscale.AdaHessian, hesscale.AdaGGNMC])
def test_no_step_takes_the_curvature_of_a_gradient_that_was_cleared(clear: Any, preset: Any) -> None:
    model = nn.Linear(3, 3)
    optimizer = preset(model.parameters())

    def loss() -> Tensor:
        return F.cross_entropy(model(random(5, 3).float()), torch.arange(5) % 3)

    optimizer.backward(1e6 * loss())
    for p in model.parameters():
        clear(p)
    loss().backward()
    with pytest.raises(RuntimeError, match="no fresh curvature"):
        optimizer.step()


@pytest.mark.parametrize("clear", CLEARING)
@pytest.mark.parametrize("fused", [None, False])
def test_nor_does_a_step_of_a_parameter_that_nothing_reaches_again(clear: Any, fused: bool | None) -> None:
    u, v = nn.Parameter(random(2, 3)), nn.Parameter(random(2, 3))
    optimizer = hesscale.AdaHesScale([u, v], fused=fused)
    optimizer.backward(bowl(u) + 1e6 * bowl(v))
    for p in (u, v):
        clear(p)
    optimizer.backward(bowl(u))
    optimizer.step()
    assert v not in optimizer.state or not optimizer.state[v]["mean_curvature"].any()


def test_what_is_written_by_hand_is_left_to_who_wrote_it() -> None:
    w = nn.Parameter(random(2, 3))
    hesscale.backward(bowl(w))
    w.grad = None
    w.curvature = mine = torch.ones_like(w)  # type: ignore[attr-defined]
    bowl(w).backward()
    assert w.curvature is mine


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
def test_a_model_whose_parameters_are_swapped_can_be_moved_after_a_pass() -> None:
    model, other = network(), network().float()
    hesscale.backward(model(random(4, 6)).square().mean())
    model.float()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    for each in (model, other):
        each.zero_grad()
        hesscale.backward(each(random(4, 6).float()).square().mean())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close((p.grad, p.curvature), (q.grad, q.curvature))
    model.zero_grad()
    model(random(4, 6).float()).square().mean().backward()
    assert all(p.curvature is None for p in model.parameters())


def test_what_was_changed_by_hand_is_added_to() -> None:
    w = nn.Parameter(random(2, 3))
    once = [hesscale.diagonal(bowl(w, seed), w)[0] for seed in range(2)]
    optimizer = hesscale.AdaHesScale([w])
    optimizer.backward(bowl(w, 0))
    w.curvature = w.curvature * 2
    optimizer.backward(bowl(w, 1))
    assert_close(w.curvature, 2 * once[0] + once[1])
    optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_ordinary_training_looks_into_no_gradient(monkeypatch: pytest.MonkeyPatch, set_to_none: bool) -> None:
    """On a GPU each such look would wait for it."""
    looks: list[int] = []
    original = Tensor.any
    monkeypatch.setattr(Tensor, "any", lambda it, *args: looks.append(1) or original(it, *args))
    train(network(), set_to_none=set_to_none)
    thrown_away = 6 * (not set_to_none)  # the one pass that no step has taken up
    assert len(looks) == thrown_away


def test_what_looks_for_cleared_gradients_is_in_no_copy() -> None:
    """Nor does torch warn that it is left out."""
    w = leaf(2, 3)
    hesscale.backward(bowl(w))
    for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert not other._backward_hooks


def test_a_compiled_model_does_not_mind() -> None:
    model = network()
    x = random(4, 6)
    hesscale.backward(model(x).square().mean())
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).square().mean().backward()
    assert all(p.grad is not None and p.curvature is None for p in model.parameters())
