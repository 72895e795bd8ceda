"""What a pass costs, counted in operator calls and allocations rather than seconds, which depend on the machine."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hesscale
from hesscale import fast
from hesscale.fast.workspace import LEAST

VIEWS = ("detach", "t.", "transpose", "view", "as_strided", "expand", "unsqueeze", "alias")
HEAVY = ("mm.", "bmm.", "addmm.", "convolution")


class Counting(TorchDispatchMode):
    """Counts operators, and those that allocate large memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.allocations: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        self.calls[name] += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.allocations[name] += tensor.untyped_storage().nbytes() >= LEAST
        return result

    @property
    def sweeps(self) -> int:
        """Operators that read or write memory: all but views."""
        return sum(number for name, number in self.calls.items() if not name.startswith(VIEWS))

    @property
    def heavy(self) -> int:
        """Matrix products and convolutions."""
        return sum(number for name, number in self.calls.items() if name.startswith(HEAVY))


def mlp(depth: int) -> nn.Sequential:
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), *hidden, nn.Linear(256, 64))


def counted(model: nn.Module, x: Tensor, backward: Callable[[Tensor], None], *, passes: int = 4) -> Counting:
    """The last of several passes: the steady state."""
    y = torch.zeros(len(x), dtype=torch.long)
    for _ in range(passes):
        for p in model.parameters():
            p.grad = p.curvature = None  # type: ignore[assignment]
        loss = F.cross_entropy(model(x), y)
        with Counting() as counting:
            backward(loss)
    return counting


def gauss_newton(loss: Tensor) -> None:
    hesscale.backward(loss, method="hesscale_gn")


METHODS: dict[str, Callable[[Tensor], None]] = {"hesscale": hesscale.backward, "hesscale_gn": gauss_newton}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [1, 128])
def test_a_layer_costs_two_products_and_a_few_sweeps(method: str, batch: int) -> None:
    x = torch.randn(batch, 64)
    shallow, deep = (
        [counted(mlp(depth), x, run) for run in (METHODS[method], torch.Tensor.backward)] for depth in (2, 6)
    )
    extra = [(ours.heavy - plain.heavy, ours.sweeps - plain.sweeps) for ours, plain in (shallow, deep)]
    products, sweeps = ((b - a) / 4 for a, b in zip(*extra, strict=True))
    assert products == 2  # s W² and (h²)ᵀ s
    assert sweeps <= (8 if method == "hesscale" else 7)  # + W², h², s summed for the bias, and three for tanh


@pytest.mark.skipif(not fast.enabled(), reason="HESSCALE_PLAIN=1 keeps no scratch memory")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [1, 128])
def test_nothing_large_is_allocated_in_the_steady_state(method: str, batch: int) -> None:
    model, x = mlp(3), torch.randn(batch, 64)
    ours, plain = (counted(model, x, run) for run in (METHODS[method], torch.Tensor.backward))
    assert plain.allocations.total() > 0  # the gradients
    assert ours.allocations == plain.allocations


def test_the_input_of_a_network_costs_nothing() -> None:
    """Neither the first layer's input nor a frozen layer's weight is worth a product."""
    model, x = mlp(1), torch.randn(8, 64)
    whole = counted(model, x, hesscale.backward).heavy
    assert whole == counted(model, x, torch.Tensor.backward).heavy + 2 * 3 - 1
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    assert counted(model, x, hesscale.backward).heavy == counted(model, x, torch.Tensor.backward).heavy + 2


def test_a_convolution_costs_one_more_backward() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    x = torch.randn(2, 3, 8, 8)
    ours, plain = (counted(model, x, run) for run in (hesscale.backward, torch.Tensor.backward))
    extra = ours.calls - plain.calls
    assert extra["convolution_backward.default"] == 2
    assert extra["threshold_backward.default"] == 2  # a slope of 0 or 1 is its own square
