"""Parameters sharded over processes (DTensor): a step works on what is stored here, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)


def is_sharded(tensor: Any) -> bool:
    """Whether ``local`` would give something else than the tensor itself."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")


def local(tensor: Any) -> Any:
    """The part of a tensor that this process holds, sharing its memory; what is not sharded comes back as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def total(parts: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
    """Σ parts, where each part is a sum over what this process holds of a parameter: over all processes' shards."""
    sums: dict[Any, Tensor] = {}
    for part, p in zip(parts, params, strict=True):
        spread = (p.device_mesh, p.placements) if hasattr(p, "to_local") else None
        sums[spread] = sums[spread] + part.to(sums[spread].device) if spread in sums else part
    found = [part if spread is None else _reduced(part, *spread) for spread, part in sums.items()]
    return torch.stack([value.to(found[0].device) for value in found]).sum()


def _reduced(part: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate  # not there in builds without distributed

    spread = [Partial() if placement.is_shard() else Replicate() for placement in placements]
    whole: Tensor = DTensor.from_local(part, mesh, spread).full_tensor()
    return whole
