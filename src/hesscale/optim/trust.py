"""The factor that keeps an update within a trust region, for all optimizers that have one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .shards import total


def shrinkage(radius: float, moves: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """min(1, √(2δ / Σ c u²)) for a radius δ: updates u multiplied by it change the model ½ Σ c u² by no more than δ.

    ``moves`` are triples of c, u and the parameter they belong to, of which both may be this process's part.
    """
    if math.isinf(radius):  # and so may be Σ c u²
        return torch.ones(())
    length = total([(c * u * u).sum() for c, u, _ in moves], [p for _, _, p in moves])
    return (2 * radius / length).sqrt().clamp(max=1.0)
