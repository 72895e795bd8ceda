"""Large tensors in chunks: what a rule computes on its way then stays in the cache, and needs little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from ..traced import is_traced
from . import enabled
from .workspace import scratch

_CACHED: Final = 1 << 16  # elements, for each thread: some such tensors fit into the cache a core has for itself
_HELD: Final = 1 << 22  # elements: other devices are slow to start and quick to sweep, only memory is a concern

_PLAIN: Final = (Tensor, torch.nn.Parameter)


def chunk_size(x: Tensor) -> int:
    """How many elements to work on at a time where x is; a compiler cuts for the cache itself."""
    return _CACHED * torch.get_num_threads() if x.is_cpu and not is_traced() else _HELD


def is_large(x: Tensor) -> bool:
    """Whether chunks pay. What is more than a tensor, such as one that is spread over processes, is left whole."""
    if type(x) not in _PLAIN:
        return False
    count = x.numel()
    return count >= 2 * _CACHED and count >= 2 * chunk_size(x) and enabled()


def chunks(rows: int, step: int) -> Iterator[slice]:
    """All rows, so many at a time, at least one."""
    step = max(1, step)
    return (slice(start, start + step) for start in range(0, rows, step))


def scratch_like(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a result that is laid out like another tensor, reused where that is possible."""
    memory = scratch(like) if dtype in (None, like.dtype) else None
    return torch.empty_like(like, dtype=dtype) if memory is None else memory


def by_rows(work: Callable[..., Sequence[Tensor | None]], *tables: Tensor | None) -> tuple[Tensor | None, ...]:
    """What ``work`` makes of tables with equally many rows, which it gets some rows at a time.

    Its first result is a table like the first, and written row by row. Others are small, and put one below the other.
    """
    like = tables[0]
    assert like is not None
    if not is_large(like):
        return tuple(work(*tables))
    table: Tensor | None = None
    small: list[Sequence[Tensor | None]] = []
    for part in chunks(like.shape[0], chunk_size(like) // max(1, like[0].numel())):
        found, *others = work(*(None if t is None else t[part] for t in tables))
        small.append(others)
        if found is not None:
            table = scratch_like(like, found.dtype) if table is None else table
            table[part] = found
    return table, *(None if rows[0] is None else torch.cat(rows) for rows in zip(*small, strict=True))


@final
class Flattened:
    """A node of a function of one variable, seen at the elements of ``part`` only: what it saved is cut down to them.

    ``size`` is how many elements the variable has; what has another size is no saved variable, and left as it is.
    """

    def __init__(self, node: Any, size: int) -> None:
        self.node, self.size, self.part = node, size, slice(0)
        self._seen: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._seen:
            value = getattr(self.node, name)
            self._seen[name] = value.reshape(-1) if self._is_variable(value) else value
        value = self._seen[name]
        return value[self.part] if self._is_variable(value) else value

    def _is_variable(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.numel() == self.size
