"""What a graph depends on, of one call: the key by which a step finds its graphs again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..columns.dial import Rank
from .backend import hooks_of_all_modules
from .call import LOOKED_INTO, Call
from .facts import Fact, Facts, key_of, looks_of


class Pass(NamedTuple):
    """What is computed: whether curvature is, and by which method and rank."""

    curvature: bool
    method: str
    rank: Rank


class Kind(NamedTuple):
    """What a graph depends on: a call that differs from all before in one of these is compiled anew."""

    batch: tuple[Any, ...]
    structure: Any
    parameters: tuple[Any, ...]
    buffers: tuple[Any, ...]
    modules: tuple[Fact, ...]
    surroundings: tuple[Fact, ...]
    autocast: tuple[Any, ...]
    backends: tuple[Any, ...]
    computed: Pass
    rules: int

    def difference(self, other: Kind) -> str:
        """In words, what is new compared with another kind."""
        changes = []
        for name, ours, theirs in zip(self._fields, self, other, strict=True):
            if ours == theirs:
                continue
            pairs = zip(theirs, ours, strict=False) if isinstance(ours, tuple) and isinstance(theirs, tuple) else ()
            old, new = next(((old, new) for old, new in pairs if new != old), (None, None))
            if old is not None and new is not None:
                is_fact = name in ("modules", "surroundings") and old[0] == new[0]
                changes.append(f"{old[0]}: {old[1]} became {new[1]}" if is_fact else f"{name}: {old} became {new}")
            else:
                changes.append(f"{name} changed")
        return "; ".join(changes)


def kind_of(call: Call, facts: Facts, computed: Pass, *, rules: int, dynamic: bool) -> Kind:
    """The kind of a call, of whose model and surroundings these are the facts."""
    sdp = torch.backends.cuda
    return Kind(
        batch=tuple(_looks(value, dynamic) for value in call.values),
        structure=call.structure,
        parameters=tuple((name, *looks_of(p)) for name, p in call.parameters.items()),
        buffers=tuple((name, *looks_of(buffer)) for name, buffer in call.buffers.items()),
        modules=facts.model,
        surroundings=facts.around,
        autocast=tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")),
        backends=(
            sdp.flash_sdp_enabled(),
            sdp.mem_efficient_sdp_enabled(),
            sdp.math_sdp_enabled(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            *hooks_of_all_modules(),
        ),
        computed=computed,
        rules=rules,
    )


def _looks(value: Any, dynamic: bool) -> Any:
    """What a graph knows of a value of the batch: all of it, unless it is a tensor or looked into elsewhere."""
    if isinstance(value, LOOKED_INTO):
        return type(value)
    if not isinstance(value, Tensor):
        return key_of(value) or (type(value), value)
    if not dynamic:
        return looks_of(value)
    shape, _, *rest = looks_of(value)
    return tuple(min(n, 2) for n in shape), *rest  # sizes are symbols: only 0 and 1 are looked at, as torch does
