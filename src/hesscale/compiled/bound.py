"""A loss function and its model as one module, in which other tensors can be put in the place of the model's.

A graph writes to tensors, but does not put new ones in their place. So where a forward pass replaces a buffer
(``self.mean = 0.9 * self.mean + ...``), the new one's values are written to the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn

from ..graph import storage_id

_CHANGED = "the forward pass replaces the buffer {name!r} by one of another shape or dtype, which cannot be compiled"
_APPEARED = (
    "the forward pass adds or removes the buffer {name!r}, which cannot be compiled: run the model once before, or "
    "register the buffer as a tensor"
)
_REPLACED = "the forward pass replaces the parameter or module {name!r}, which cannot be compiled: do so between calls"
_TWO_NAMES = (
    "the forward pass replaces the buffer {name!r}, which has a second name, which cannot be compiled: write to it in "
    "place"
)


@final
class Bound(nn.Module):
    """``forward`` is ``loss_fn`` of the model. ``modules`` are those that it may set buffers of."""

    def __init__(self, loss_fn: Callable[..., Any], model: nn.Module, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.loss_fn, self.model = loss_fn, model
        self._open = tuple(modules)  # no submodules of this one: some are not the model's

    def forward(self, args: Any, kwargs: Any, watched: AbstractContextManager[Any]) -> Any:
        """What ``loss_fn`` returns, after buffers have got their new values."""
        fixed, buffers = self._fixed(), self._buffers_now()
        with watched:
            result = self.loss_fn(self.model, *args, **kwargs)
            for (_, name), _ in self._fixed().items() ^ fixed.items():
                raise ValueError(_REPLACED.format(name=name))
            self._write(buffers)
        return result

    __call__ = forward  # hooks of all modules are not meant for this one

    def _fixed(self) -> dict[tuple[int, str], int]:
        """Parameters and modules, under all names."""
        return {
            (place, name): id(one)
            for place, module in enumerate(self._open)
            for held in (module._parameters, module._modules)
            for name, one in held.items()
        }

    def _buffers_now(self) -> dict[tuple[int, str], Tensor]:
        return {
            (place, name): buffer
            for place, module in enumerate(self._open)
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _write(self, before: dict[tuple[int, str], Tensor]) -> None:
        """Copies what has replaced a buffer into it; one that goes on under another name is read before."""
        now = self._buffers_now()
        for _, name in now.keys() ^ before.keys():
            raise ValueError(_APPEARED.format(name=name))
        replaced = {key: buffer for key, buffer in before.items() if now[key] is not buffer}
        memory = {storage_id(buffer) for buffer in replaced.values()}
        kept = {id(buffer) for key, buffer in before.items() if key not in replaced}
        with torch.no_grad():
            values = {key: now[key].clone() if storage_id(now[key]) in memory else now[key] for key in replaced}
            for key, buffer in replaced.items():
                if id(buffer) in kept:
                    raise ValueError(_TWO_NAMES.format(name=key[1]))
                if buffer.shape != values[key].shape or buffer.dtype is not values[key].dtype:
                    raise ValueError(_CHANGED.format(name=key[1]))
                buffer.copy_(values[key])
