"""Data made up on the spot: noise with random labels, images of noisy templates, sequences to look things up in."""

from __future__ import annotations

import torch
from torch import Tensor

CLASSES = 10
SIDE = 10
LENGTH, VOCABULARY = 6, 8


def noise(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The paper's data: x ~ N(0, I₆) and labels drawn uniformly from ten, [N, 6] and [N]."""
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def templates(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ten fixed random images under noise of the same size, [N, 1, 10, 10]; the label says which one."""
    fixed = torch.Generator().manual_seed(0)
    images = torch.randn(CLASSES, 1, SIDE, SIDE, generator=fixed, dtype=torch.float64)
    y = torch.randint(CLASSES, (count,), generator=generator)
    return images[y] + torch.randn(count, 1, SIDE, SIDE, generator=generator, dtype=torch.float64), y


def lookup(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of tokens, [N, 6]; the first token says at which later place the label stands."""
    x = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    x[:, 0] %= LENGTH - 1
    return x, x.gather(1, x[:, :1] + 1).squeeze(1)
