"""Memory is used again from pass to pass, and never while anybody can still read it."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.fast import workspace
from hesscale.fast.workspace import Workspace, product, squared, use_workspace, workspace_of
from hesscale.rules import registered

SIZE = (256, 256)  # in float32 more than workspace.LEAST
LAYOUT = (SIZE, (256, 1))


@contextmanager
def lending(space: Workspace | None) -> Iterator[None]:
    before = use_workspace(space)
    try:
        yield
    finally:
        use_workspace(before)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))


def run(model: nn.Module, *, seed: int = 0) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    for p in model.parameters():
        p.curvature = None  # type: ignore[assignment]
    hesscale.backward(F.cross_entropy(model(x), torch.tensor([0, 1, 2, 3])))


def curvatures(model: nn.Module) -> list[Tensor]:
    return [p.curvature for p in model.parameters()]  # type: ignore[misc]


def test_a_free_buffer_is_lent_again_and_a_lent_one_is_not() -> None:
    space = Workspace()
    first = space.empty(*LAYOUT, torch.float32)
    second = space.empty(*LAYOUT, torch.float32)
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    view = first[3:].T
    del first
    assert space.empty(*LAYOUT, torch.float32).data_ptr() != place  # the view still reads it
    del view
    assert place in [tensor.data_ptr() for tensor in [space.empty(*LAYOUT, torch.float32) for _ in range(2)]]


def test_layouts_and_dtypes_have_buffers_of_their_own() -> None:
    space = Workspace()
    for size, stride in ((SIZE, (256, 1)), (SIZE, (1, 256)), ((512, 128), (128, 1)), ((256, 256, 1), (256, 1, 1))):
        for dtype in (torch.float32, torch.float64):
            lent = space.empty(size, stride, dtype)
            assert lent.shape == size and lent.stride() == stride and lent.dtype == dtype
            assert lent.untyped_storage().nbytes() == lent.numel() * lent.element_size()


def test_buffers_that_passes_no_longer_need_are_dropped() -> None:
    space = Workspace()
    lent = weakref.ref(space.empty(*LAYOUT, torch.float32).untyped_storage())
    for _ in range(workspace._KEPT):
        space.begin_pass()
        assert space._pools
    space.begin_pass()
    gc.collect()
    assert not space._pools and lent() is None


def test_a_pass_puts_curvature_where_that_of_the_last_one_was() -> None:
    model = network()
    run(model)
    places = {h.data_ptr() for h in curvatures(model) if h.numel() * 4 >= workspace.LEAST}
    assert len(places) == 2
    for seed in range(1, 4):
        run(model, seed=seed)
        assert places == {h.data_ptr() for h in curvatures(model) if h.numel() * 4 >= workspace.LEAST}


def test_curvature_that_a_user_keeps_stays_as_it_is() -> None:
    model = network()
    run(model)
    kept, part = curvatures(model), model[2].weight.curvature[5:7]  # type: ignore[union-attr, index]
    copies = [h.clone() for h in kept]
    for seed in range(1, 5):
        run(model, seed=seed)
    assert all(torch.equal(h, copy) for h, copy in zip(kept, copies, strict=True))
    del kept
    gc.collect()
    run(model, seed=9)
    assert torch.equal(part, copies[2][5:7])


def test_curvature_in_an_autograd_graph_is_not_overwritten() -> None:
    model = network()
    run(model)
    scale = torch.ones(256, 256, requires_grad=True)
    saved = (scale * model[0].weight.curvature).sum()  # type: ignore[operator]
    expected = curvatures(model)[0].clone()
    run(model, seed=1)
    saved.backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, expected, rtol=0, atol=0)


def test_a_workspace_goes_with_its_model() -> None:
    model = network()
    run(model)
    buffers = [
        weakref.ref(b)
        for _, own in workspace._LOCAL.by_memory.values()
        for pool in own._pools.values()
        for b in pool.buffers
    ]
    assert buffers
    del model
    gc.collect()
    run(nn.Linear(256, 4))  # the next pass of this thread, of whatever model
    gc.collect()
    assert not any(buffer() is not None for buffer in buffers)


def test_parameters_can_still_be_swapped() -> None:
    model = network()
    run(model)
    model.zero_grad()
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(256, 256)))  # type: ignore[arg-type]
    run(model)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_memory_is_lent_behind_a_fused_recurrent_layer_too(kind: Any) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.head = nn.Linear(8, 256), kind(256, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.body(self.first(x).tanh())[0][:, -1])

    in_use: list[bool] = []

    def tanh(node: Any) -> tuple[Tensor, Tensor]:
        in_use.append(workspace._LOCAL.current is not None)
        y = node._saved_result
        return 1 - y * y, -2 * y * (1 - y * y)

    model, x = Reader(), torch.randn(4, 6, 8)
    with registered(hesscale.Elementwise(tanh), "TanhBackward0"):
        hesscale.backward(F.cross_entropy(model(x), torch.tensor([0, 1, 2, 3])))
    assert in_use[-1]  # the last is the one behind the recurrent layer
    assert workspace._LOCAL.current is None


def test_memory_that_left_for_another_process_is_not_lent_again() -> None:
    space = Workspace()
    lent = space.empty(*LAYOUT, torch.float32)
    lent.share_memory_()
    place = lent.data_ptr()
    del lent
    assert space.empty(*LAYOUT, torch.float32).data_ptr() != place


def test_a_storage_that_a_user_keeps_is_not_lent_again() -> None:
    space = Workspace()
    lent = space.empty(*LAYOUT, torch.float32)
    storage = lent.untyped_storage()
    del lent
    assert space.empty(*LAYOUT, torch.float32).data_ptr() != storage.data_ptr()
    place = storage.data_ptr()
    del storage
    assert place in [tensor.data_ptr() for tensor in [space.empty(*LAYOUT, torch.float32) for _ in range(2)]]


def test_threads_do_not_share_buffers() -> None:
    leaf = torch.zeros(1, requires_grad=True)
    spaces = [workspace_of(leaf)]
    thread = threading.Thread(target=lambda: spaces.append(workspace_of(leaf)))
    thread.start()
    thread.join()
    assert None not in spaces and spaces[0] is not spaces[1] and workspace_of(leaf) is spaces[0]


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: torch.cat([x, x], 1)[:, ::2],
    "small": lambda x: x[:2, :2],
    "empty": lambda x: x[:0],
    "vector": lambda x: x.reshape(-1),
    "channels last": lambda x: x.reshape(4, 16, 32, 32).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.reshape(16, 64, 64).permute(2, 0, 1),
    "expanded": lambda x: x[:1].expand(256, 256),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lent", [True, False])
def test_squares_are_those_of_torch(layout: Any, dtype: torch.dtype, lent: bool) -> None:
    x = layout(torch.randn(SIZE, dtype=dtype))
    with lending(Workspace() if lent else None), torch.no_grad():
        result = squared(x)
        assert torch.equal(result, x * x) and result.stride() == (x * x).stride()


@pytest.mark.parametrize("lent", [True, False])
def test_products_are_those_of_torch(lent: bool) -> None:
    a, b = torch.randn(300, 7), torch.randn(290, 7)
    with lending(Workspace() if lent else None), torch.no_grad():
        assert torch.equal(product(a, b.mT), a @ b.mT)
        assert torch.equal(product(a.mT, a), a.mT @ a)


def test_nothing_is_lent_where_torch_records() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    with lending(Workspace()):
        squared(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_a_pass_over_many_layers_asks_each_buffer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all that are lent already, for each layer: that would grow with the square of their number."""
    model = nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(256, 256), nn.Tanh())])
    for _ in range(3):
        run(model)
    asked = 0
    users = workspace._Buffer.users

    def counted(buffer: Any) -> Any:
        nonlocal asked
        asked += 1
        return users(buffer)

    monkeypatch.setattr(workspace._Buffer, "users", counted)
    run(model)
    assert 20 <= asked <= 3 * 2 * 20
