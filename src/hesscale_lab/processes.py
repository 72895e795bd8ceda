"""The processes that train one network together, started by torchrun: each takes its part of the same batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hesscale.distributed import synchronize
from hesscale.optim import CurvatureScaled

from .optimizers import GradientScaled

Found = TypeVar("Found")


@dataclass(frozen=True)
class Team:
    """This process among those that train together; by itself in most cases."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Team:
        """Those of torch's process group, if there is one."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_first(self) -> bool:
        """Only the first reads checkpoints, measures and writes."""
        return self.rank == 0

    def share(self, find: Callable[[], Found]) -> Found:
        """What the first process finds, known to all; what it raises is raised by all."""
        if self.count == 1:
            return find()
        outcome: list[Any] = [_outcome(find)] if self.is_first else [None]
        dist.broadcast_object_list(outcome)
        found, error = outcome[0]
        if error is not None:
            raise error
        return found

    def part(self, batch: Tensor) -> Tensor:
        """This process's part of a batch."""
        return batch[self.rank :: self.count]

    def average(self, value: Tensor) -> float:
        """The mean of one number over all processes."""
        if self.count > 1:
            dist.all_reduce(value)
        return float(value) / self.count

    def wrap(self, model: nn.Module, optimizer: Optimizer, *, batch: int) -> nn.Module:
        """The model to train with: itself, or a copy of it kept in step with the others."""
        if self.count == 1:
            return model
        if batch % self.count:
            raise ValueError(f"{self.count} processes cannot take equal parts of a batch of {batch}")
        shared = DistributedDataParallel(model)
        if isinstance(optimizer, GradientScaled):
            optimizer.register_curvature_hook(lambda _: None)  # gradients are averages already
        elif isinstance(optimizer, CurvatureScaled):
            synchronize(optimizer, shared)
        return shared

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()


def _outcome(find: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return find(), None
    except Exception as error:  # the others wait for an answer, whatever it is
        return None, error
