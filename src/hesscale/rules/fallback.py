"""Curvature of an operation that has no rule, by autograd: exact for small ones, one random probe for any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .calculus import added, differentiate, inputs_of, pull, pull_weighted
from .families import Curvatures, Rule

_LIMIT = 4096


def fallback_named(name: str, generator: torch.Generator | None) -> Rule | None:
    """The rule that ``missing=name`` asks for; None for "raise"."""
    if name == "raise":
        return None
    if name == "exact":
        return ByAutograd()
    if name == "sample":
        if generator is None:
            raise ValueError("missing='sample' draws random numbers: pass generator=torch.Generator().manual_seed(...)")
        return BySampling(generator)
    raise ValueError(f"unknown missing={name!r}: choose 'raise', 'exact' or 'sample'")


@dataclass(frozen=True)
class ByAutograd(Rule):
    """Transport and residual element by element: one backward per output, one double backward per input."""

    limit: int = _LIMIT

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        self._refuse_large(node, s, g, wanted)
        transports: Curvatures = [None] * len(wanted)
        for outputs, weight in _unit_vectors(s):
            rows = [None if row is None else weight * row.square() for row in pull(node, *outputs)]
            transports = [added(total, row) for total, row in zip(transports, rows, strict=True)]
        firsts = pull_weighted(node, *g) if any(grad is not None for grad in g) else (None,) * len(wanted)
        return [
            added(transport, None if shape is None else _second(node, edge, first))
            for edge, shape, transport, first in zip(node.next_functions, wanted, transports, firsts, strict=True)
        ]

    def _refuse_large(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> None:
        sizes = [tensor.numel() for tensor in (*s, *g) if tensor is not None]
        sizes += [shape.numel() for shape in wanted if shape is not None]
        if max(sizes, default=0) > self.limit:
            raise NotImplementedError(
                f"{node.name()} works on {max(sizes)} elements, too many to go through one by one (the limit is "
                f"{self.limit}): pass missing='sample', or register a rule for it."
            )

    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        return False


def _unit_vectors(s: Curvatures) -> Iterator[tuple[list[Tensor | None], Tensor]]:
    """Every unit vector at a node's outputs, with the curvature that belongs to it."""
    for i, entry in enumerate(s):
        for k in range(0 if entry is None else entry.numel()):
            assert entry is not None
            unit = torch.zeros_like(entry, memory_format=torch.contiguous_format)
            unit.view(-1)[k] = 1.0
            yield [unit if i == j else None for j in range(len(s))], entry.reshape(-1)[k]


def _second(node: Any, edge: Any, first: Tensor | None) -> Tensor | None:
    """d first_i / d x_i for every i."""
    if first is None or not first.requires_grad:
        return None
    result = torch.zeros_like(first, memory_format=torch.contiguous_format, requires_grad=False)
    for i in range(first.numel()):
        unit = torch.zeros_like(result)
        unit.view(-1)[i] = 1.0
        row = _differentiated(node, edge, first, unit)
        if row is not None:
            result.view(-1)[i] = row.reshape(-1)[i]
    return result


def _differentiated(node: Any, edge: Any, first: Tensor, weights: Tensor) -> Tensor | None:
    try:
        return differentiate(first, edge, fixed=inputs_of(node), weights=weights)
    except RuntimeError as error:
        raise NotImplementedError(
            f"{node.name()} cannot be differentiated twice, so it needs a rule: {error}"
        ) from error


@dataclass(frozen=True)
class BySampling(Rule):
    """One unbiased probe with random signs v, w:  Jᵀ(v∘s) ∘ Jᵀv  +  w ∘ ∇(w·Jᵀg)."""

    generator: torch.Generator

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        transports: Curvatures = [None] * len(wanted)
        if any(entry is not None for entry in s):
            signs = [None if entry is None else self._signs(entry) for entry in s]
            weighted = [None if v is None or t is None else v * t for v, t in zip(signs, s, strict=True)]
            pairs = zip(pull(node, *weighted), pull(node, *signs), strict=True)
            transports = [None if a is None or b is None else a * b for a, b in pairs]
        firsts = pull_weighted(node, *g) if any(grad is not None for grad in g) else (None,) * len(wanted)
        return [
            added(transport, None if shape is None else self._residual(node, edge, first))
            for edge, shape, transport, first in zip(node.next_functions, wanted, transports, firsts, strict=True)
        ]

    def _residual(self, node: Any, edge: Any, first: Tensor | None) -> Tensor | None:
        if first is None or not first.requires_grad:
            return None
        signs = self._signs(first)
        bend = _differentiated(node, edge, first, signs)
        return None if bend is None else signs * bend

    def _signs(self, like: Tensor) -> Tensor:
        bits = torch.randint(0, 2, like.shape, generator=self.generator, device=self.generator.device)
        return (2 * bits - 1).to(like)

    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        return False
