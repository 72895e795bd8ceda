"""What the optimizers' tests train: a small network on made-up data, in float64."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.optim import CurvatureScaled

PRESETS: dict[str, type[CurvatureScaled]] = {
    "AdaHesScale": hesscale.AdaHesScale,
    "AdaHesScaleGN": hesscale.AdaHesScaleGN,
    "AdaBL89": hesscale.AdaBL89,
    "AdaGGNMC": hesscale.AdaGGNMC,
    "AdaHessian": hesscale.AdaHessian,
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            p.copy_(0.5 * random(*p.shape, seed=seed))
    return model


def loss_of(model: nn.Module, batch: int = 0, size: int = 6) -> Tensor:
    labels = torch.randint(3, (size,), generator=torch.Generator().manual_seed(50 + batch))
    return F.cross_entropy(model(random(size, 5, seed=100 + batch)), labels)


def backward(optimizer: CurvatureScaled, loss: Tensor, seed: int = 0) -> None:
    """``optimizer.backward``, with the same draws in each run of a test."""
    if isinstance(optimizer, hesscale.AdaGGNMC | hesscale.AdaHessian):
        optimizer.backward(loss, generator=torch.Generator().manual_seed(seed))
    else:
        optimizer.backward(loss)


def train(
    model: nn.Module,
    optimizer: CurvatureScaled,
    steps: Iterable[int] = range(5),
    *,
    before_step: Callable[[], Any] = lambda: None,
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        losses.append(loss.item())
        backward(optimizer, loss, step)
        before_step()
        optimizer.step()
    return losses


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Bit for bit."""
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def assert_close(ours: Iterable[Tensor], theirs: Iterable[Tensor], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(list(ours), list(theirs), rtol=tolerance, atol=tolerance)


TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-13}
"""To which two implementations of the same step agree."""


def made(shapes: Iterable[Any], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(random(*shape, seed=seed).to(dtype)) for seed, shape in enumerate(shapes)]


def moved_by(
    params: list[Any], feed: Callable[[list[Any], int], None], options: dict[str, Any], steps: int
) -> list[Tensor]:
    """Parameters and averages after some steps, before each of which ``feed`` writes gradients and curvature."""
    optimizer = hesscale.AdaHesScale(params, lr=0.01, **options)
    for step in range(steps):
        feed(params, step)
        optimizer.step()
    averages = [optimizer.state[p][name] for p in params for name in ("exp_avg", "mean_curvature")]
    return [*(p.detach() for p in params), *averages]
