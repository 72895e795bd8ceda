"""Matrices of rank one that are not written out.

At batch size one the weight of a linear layer, y = Wx, has the curvature s ⊗ x²: two vectors. Written out it is as
large as the weight, and whoever takes one step with it would spend more on writing and reading it than on computing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def _of_whole(name: str) -> Callable[..., Any]:
    def method(self: Outer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.whole(), name)(*args, **kwargs)

    method.__name__ = name
    return method


@final
class Outer(Tensor):
    """column ⊗ row. Whoever asks for more than the two gets the matrix, which is then written out, once and for all.

    So it may be used, and changed in place, as any tensor; only ``factors`` tells the difference.
    """

    _factors: tuple[Tensor, Tensor]
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, column: Tensor, row: Tensor) -> Outer:
        size = (column.numel(), row.numel())
        made: Outer = Tensor._make_wrapper_subclass(cls, size, dtype=column.dtype, device=column.device)
        torch._C._set_throw_on_mutable_data_ptr(made)  # rather than let somebody read memory that is not there
        return made

    def __init__(self, column: Tensor, row: Tensor) -> None:
        self._factors, self._whole = (column, row), None

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """The column and the row; None once it is written out, since it may have been changed."""
        return self._factors if self._whole is None else None

    def whole(self) -> Tensor:
        """The matrix, as a tensor like any other."""
        if self._whole is None:
            column, row = self._factors
            with torch.inference_mode(False):  # it may be changed after the mode has ended
                self._whole = column.unsqueeze(1) * row
        return self._whole

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, named = tree_map_only(cls, cls.whole, (args, dict(kwargs or {})))
        return func(*given, **named)

    # those that read memory without an operator
    __deepcopy__ = _of_whole("__deepcopy__")
    __dlpack__ = _of_whole("__dlpack__")
    __reduce_ex__ = _of_whole("__reduce_ex__")
    __repr__ = _of_whole("__repr__")  # type: ignore[assignment]
    apply_ = _of_whole("apply_")
    data = property(lambda self: self.whole().data, lambda self, value: setattr(self.whole(), "data", value))
    data_ptr = _of_whole("data_ptr")
    map_ = _of_whole("map_")
    numpy = _of_whole("numpy")
    share_memory_ = _of_whole("share_memory_")
    storage = _of_whole("storage")
    tolist = _of_whole("tolist")
    untyped_storage = _of_whole("untyped_storage")


def factors_of(matrix: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The column and the row of a matrix that is not written out; None for every other."""
    return matrix.factors if isinstance(matrix, Outer) else None


def written_out(matrix: Tensor) -> Tensor:
    """The matrix as a tensor like any other; nearly always it is one."""
    return matrix.whole() if isinstance(matrix, Outer) else matrix


def transposed(matrix: Tensor) -> Tensor:
    """The transpose; of a matrix that is not written out, one that is not either."""
    factors = factors_of(matrix)
    return matrix.t() if factors is None else Outer(factors[1], factors[0])
