"""Small tensors and problems that several tests share."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return random(*shape, seed=seed, dtype=dtype).requires_grad_()


def assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def bowl(w: Tensor, seed: int = 0) -> Tensor:
    return F.mse_loss(F.linear(random(5, 3, seed=seed + 10), w), random(5, 2, seed=seed + 20))
