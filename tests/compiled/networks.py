"""Networks, batches and losses that tests of compiled passes share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.double_backward import unfused

from ..rules.case import Case


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


class Tied(nn.Module):
    """Embedding and head share a weight; batch norm, dropout of nothing, a gate, a learned scalar, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)
        self.memory, self.head = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.scale, self.drop = nn.Parameter(torch.tensor(1.3)), nn.Dropout(0.0)

    def forward(self, tokens: Tensor) -> Any:
        h = self.norm(self.embedding(tokens).mT).mT
        h, _ = self.memory(self.drop(h * torch.sigmoid(h)))
        return self.head(h.mean(1) * self.scale) / 2.0


def loss_of_case(case: Case) -> Callable[..., Tensor]:
    """Σ g·y + ½ Σ s·(y − y₀)² over the outputs y of a rule's case: g and s arrive at its node."""

    def loss_fn(model: nn.Module, *tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        outputs = case.function(*(next(rest) if isinstance(value, Tensor) else value for value in case.inputs))
        outputs = [outputs] if isinstance(outputs, Tensor) else [out for out in outputs if out.requires_grad]
        y = torch.cat([out.reshape(-1) for out in outputs])
        seed = torch.arange(y.numel(), dtype=y.dtype)
        return (seed.sin() * y).sum() + 0.5 * (seed.cos() * (y - y.detach()).square()).sum()

    return loss_fn


def words(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (count, 2), generator=generator), torch.randint(11, (count,), generator=generator)


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def vectors(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=generator, dtype=dtype), torch.randint(3, (count,), generator=generator)


def assert_same(ours: nn.Module, eager: nn.Module, check: Callable[[Any, Any], bool]) -> None:
    """Parameters, gradients, curvature and buffers."""
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert check(p, q), name
        for a, b in ((p.grad, q.grad), (getattr(p, "curvature", None), getattr(q, "curvature", None))):
            assert (a is None) == (b is None), name
            assert a is None or check(a, b), name
    for (name, p), q in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
        assert check(p, q[1]), name


def compiled(function: Any, *, backend: str = "aot_eager", **options: Any) -> Any:
    """``torch.compile`` by hesscale, whose pieces another backend compiles."""
    return torch.compile(function, backend="hesscale", options={"backend": backend}, **options)


def close(tolerance: float = 1e-10) -> Callable[[Any, Any], bool]:
    return lambda a, b: torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def compare(
    model: nn.Module,
    *batches: Any,
    loss_fn: Callable[..., Tensor] = cross_entropy,
    whole: bool = False,
    check: Callable[[Any, Any], bool] = close(),  # noqa: B008
    compile_options: Mapping[str, Any] = {},
    **options: Any,
) -> nn.Module:
    """Passes of a compiled model, or of the whole loss compiled, accumulate what eager ones do. Returns the model."""
    twin = copy.deepcopy(model)
    ours = compiled(loss_fn if whole else model, **compile_options)
    for number, batch in enumerate(batches):
        torch.manual_seed(number)  # of random signs
        loss = ours(model, *batch) if whole else loss_fn(ours, *batch)
        hesscale.backward(loss, **options)
        torch.manual_seed(number)
        with unfused(twin):
            expected = loss_fn(twin, *batch)
        hesscale.backward(expected, **options)
        assert check(loss.detach(), expected.detach())
        assert_same(model, twin, check)
    return model
