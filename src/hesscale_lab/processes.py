"""This process (threads, memory), and the processes that torchrun started to train one network together."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hesscale.distributed import synchronize
from hesscale.optim import CurvatureScaled

from .optimizers import GradientScaled

Result = TypeVar("Result")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Lets torch compute with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory: small convolutional networks train up to a third faster."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL("libc.so.6").mallopt
            for parameter, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):  # MMAP_MAX, TRIM_THRESHOLD, TOP_PAD
                mallopt(parameter, value)


@dataclass(frozen=True)
class Team:
    """This process among those that train together; usually it is alone."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Team:
        """The processes of torch's process group, if there is one."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_first(self) -> bool:
        """Only the first process reads checkpoints, measures and writes."""
        return self.rank == 0

    def share(self, compute: Callable[[], Result]) -> Result:
        """What the first process computes, sent to all; if it raises an error, all raise it."""
        if self.count == 1:
            return compute()
        outcome: list[Any] = [_outcome(compute)] if self.is_first else [None]
        dist.broadcast_object_list(outcome)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def part(self, batch: Tensor) -> Tensor:
        """This process's part of a batch."""
        return batch[self.rank :: self.count]

    def average(self, value: Tensor) -> float:
        """The mean of a number over all processes."""
        if self.count > 1:
            dist.all_reduce(value)
        return float(value) / self.count

    def wrap(self, model: nn.Module, optimizer: Optimizer, *, batch: int) -> nn.Module:
        """The model to train with: itself, or in a team a wrapper that averages gradients and curvature."""
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
        """Returns when all processes have called it."""
        if self.count > 1:
            dist.barrier()


def _outcome(compute: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return compute(), None
    except Exception as error:  # the other processes wait for an answer, whatever it is
        return None, error
