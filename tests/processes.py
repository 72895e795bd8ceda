"""Several processes of one test, which work together through gloo."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def together(process: int, meeting: Path, *, count: int = 2) -> Iterator[None]:
    """This process is one of ``count`` that meet at a file; it ends where the block does.

    The group is not taken down: gloo's threads now and then abort a process that does so, when all is done.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(str(meeting), count)
    dist.init_process_group("gloo", store=store, rank=process, world_size=count)
    yield
    store.set(f"done {process}", "")  # whoever leaves first would close the others' connections
    store.wait([f"done {other}" for other in range(count)])
    os._exit(0)
