"""Curvature of rank one that is not written out: it is the same curvature, and a tensor to all who use it."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.outer import Outer, transposed

WIDE = 260  # 260 × 260 numbers are enough to be worth it


def outer() -> Outer:
    return Outer(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 4.0]))


MATRIX = torch.tensor([[0.5, 4.0], [-1.0, -8.0], [1.5, 12.0]])


def saved_and_loaded(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


USES: dict[str, Callable[[Tensor], Any]] = {
    "whole": lambda x: x.whole(),  # type: ignore[attr-defined]
    "clone": torch.clone,
    "detach": Tensor.detach,
    "data": lambda x: x.data,
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "tolist": lambda x: x.tolist(),
    "dlpack": torch.from_dlpack,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved_and_loaded,
    "add": lambda x: x + 0,
    "foreach": lambda x: torch._foreach_add([x], 0)[0],
    "stack": lambda x: torch.stack([x])[0],
    "rows": lambda x: torch.stack([*x]),
    "item": lambda x: [[x[i, j].item() for j in range(2)] for i in range(3)],
    "double": Tensor.double,
    "transpose": lambda x: x.mT.mT,
    "T": lambda x: x.T.T,
    "storage": lambda x: torch.tensor([]).set_(x.untyped_storage()).view(3, 2),
    "in place": lambda x: x.mul_(1.0),
    "share": lambda x: x.share_memory_(),
    "apply": lambda x: x.apply_(lambda number: number),
    "set data": lambda x: (setattr(x, "data", x.data.clone()), x)[1],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_it_can_be_used_as_any_tensor(use: Callable[[Tensor], Any]) -> None:
    assert torch.equal(torch.as_tensor(np.asarray(use(outer())), dtype=torch.float32), MATRIX)


def test_it_looks_like_a_tensor_before_it_is_written_out() -> None:
    x = outer()
    assert (x.shape, x.dtype, x.device, x.stride()) == (MATRIX.shape, MATRIX.dtype, MATRIX.device, MATRIX.stride())
    assert x.factors is not None
    turned = transposed(x)
    assert isinstance(turned, Outer) and turned.factors is not None and turned.shape == (2, 3)
    assert repr(x) == repr(MATRIX)


@pytest.mark.parametrize(
    "change",
    [lambda x: x.mul_(2), lambda x: x[0].zero_(), lambda x: x.__setitem__((1, 1), 7.0), lambda x: x.t().add_(1)],
    ids=["mul_", "view", "setitem", "transpose"],
)
def test_what_changes_it_in_place_is_kept(change: Callable[[Tensor], Any]) -> None:
    x, expected = outer(), MATRIX.clone()
    change(x)
    change(expected)
    assert torch.equal(x, expected)
    assert x.factors is None


def test_it_can_be_written_to() -> None:
    x = outer()
    torch.add(MATRIX, 1, out=x)
    assert torch.equal(x, MATRIX + 1)


def test_a_way_to_its_memory_that_python_does_not_see_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(outer())


class Tied(nn.Module):
    """One weight used twice, by different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


class Summed(nn.Module):
    """Two weights that get the same curvature, each in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDE, WIDE) / 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.first + self.second)


class Transposed(nn.Module):
    """A weight whose memory is that of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(WIDE, WIDE) / 16).t())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Shapes(nn.Module):
    """A row in three dimensions and a vector, which torch makes other nodes of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x[None])))[0] + self.layer(x[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 270), nn.Linear(270, 3)), 2),
    "tied": (Tied, 0),
    "summed": (Summed, 0),
    "transposed": (Transposed, 0),
    "shapes": (Shapes, 0),
    "normed": (lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE)), 2),
}


def model_and_input(name: str, rows: int = 1) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[name][0](), torch.randn(rows, WIDE)


def curvatures(model: nn.Module) -> list[Any]:
    return [p.curvature for p in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
@pytest.mark.parametrize("name", MODELS)
def test_the_curvature_is_the_same_factored_or_not(name: str, method: str) -> None:
    model, x = model_and_input(name)
    found = []
    for factored in (False, True):
        model.zero_grad()
        hesscale.backward(model(x).square().sum(), method=method, factored=factored)
        found.append(curvatures(model))
    plain, factored_ones = found
    assert not any(isinstance(h, Outer) for h in plain)
    assert sum(isinstance(h, Outer) for h in factored_ones) == MODELS[name][1]
    assert all(torch.equal(a, b) for a, b in zip(plain, factored_ones, strict=True))
    assert all(h.stride() == p.stride() for h, p in zip(factored_ones, model.parameters(), strict=True))
    assert len({h.data_ptr() for h in factored_ones}) == len(factored_ones)


@pytest.mark.parametrize("rows", [2, 0], ids=["two rows", "none"])
def test_other_batch_sizes_are_written_out(rows: int) -> None:
    model, x = model_and_input("mlp", rows)
    hesscale.backward(model(x).square().sum(), factored=True)
    assert not any(isinstance(h, Outer) for h in curvatures(model))


def test_small_weights_are_written_out() -> None:
    small, y = nn.Linear(20, 20), torch.randn(1, 20)
    hesscale.backward(small(y).square().sum(), factored=True)
    assert not isinstance(curvatures(small)[0], Outer)


def test_it_shares_nothing_with_the_seed_of_a_pass() -> None:
    w, x = nn.Parameter(torch.randn(WIDE, WIDE) / 16), torch.randn(1, WIDE)
    seed = torch.rand(1, WIDE)
    expected = seed.clone().mT @ x.square()
    hesscale.backward(x @ w.t(), torch.ones_like(seed), seed, factored=True)
    seed.zero_()
    assert isinstance(w.curvature, Outer)  # type: ignore[attr-defined]
    assert torch.equal(w.curvature, expected)  # type: ignore[attr-defined]


def test_it_adds_up_over_passes_as_curvature_does() -> None:
    totals = []
    for factored in (False, True):
        model, x = model_and_input("mlp")
        for scale in (1.0, 2.0, 0.5):
            hesscale.backward(model(scale * x).square().sum(), factored=factored)
        totals.append(curvatures(model))
    assert all(torch.equal(a, b) for a, b in zip(*totals, strict=True))


BIASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "vector": lambda x, w, b: x[0] @ w.t() + b[0],
    "squeezed": lambda x, w, b: (x @ w.t()).squeeze(0) + b[0],
    "row": lambda x, w, b: x @ w.t() + b,
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "left": lambda x, w, b: w @ x.t() + b.t(),
}


@pytest.mark.parametrize("name", BIASES)
def test_it_shares_nothing_with_the_curvature_of_a_bias(name: str) -> None:
    found = []
    for factored in (False, True):
        torch.manual_seed(0)
        w, b = nn.Parameter(torch.randn(WIDE, WIDE) / 16), nn.Parameter(torch.randn(1, WIDE))
        x = torch.randn(1, WIDE)
        for _ in range(2):
            hesscale.backward(BIASES[name](x, w, b).tanh().square().sum(), factored=factored)
            b.curvature.mul_(0.5)  # type: ignore[attr-defined]
        w.curvature.mul_(3.0)  # type: ignore[attr-defined]
        found.append([w.curvature, b.curvature])  # type: ignore[attr-defined]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_written_out_in_inference_mode_can_be_changed_after_it() -> None:
    x = outer()
    with torch.inference_mode():
        assert x.norm() > 0
    x.mul_(2)
    assert torch.equal(x, 2 * MATRIX)


def test_it_stays_what_it_was_while_later_passes_run() -> None:
    model, x = model_and_input("mlp")
    hesscale.backward(model(x).square().sum())
    expected = curvatures(model)
    model.zero_grad()
    hesscale.backward(model(x).square().sum(), factored=True)
    kept = curvatures(model)
    for _ in range(3):
        model.zero_grad()
        hesscale.backward(model(5 * x).square().sum(), factored=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
