"""Curvature of an operation that has no rule, by autograd: exact for small ones, one random probe for any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .calculus import added, differentiate, inputs_of, is_traced, pull, pull_weighted, reduced
from .families import Curvatures, Rule
from .probing import diagonal_of, separate_slopes

_LIMIT = 4096
_ERROR = "torch::autograd::Error"  # what @once_differentiable puts in place of a derivative


def fallback_named(name: str, generator: torch.Generator | None) -> Rule | None:
    """The rule that ``missing=name`` asks for; None for "raise"."""
    if name == "raise":
        return None
    if name == "exact":
        return ByAutograd(traced_as_elementwise=True)
    if name == "sample":
        if generator is None:
            raise ValueError("missing='sample' draws random numbers: pass generator=torch.Generator().manual_seed(...)")
        return BySampling(generator)
    raise ValueError(f"unknown missing={name!r}: choose 'raise', 'exact' or 'sample'")


@dataclass(frozen=True)
class ByAutograd(Rule):
    """Transport and residual by autograd, in a few runs where a node turns out to be element-wise.

    Any other is gone through element by element: one backward per output, one double backward per input.
    """

    traced_as_elementwise: bool = False
    """What a node is taken for while tracing, when nothing can be found out: nan comes out if that was wrong."""

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        transports = self._transports(node, s) if any(entry is not None for entry in s) else [None] * len(wanted)
        firsts = _weighted(node, g, wanted) if any(grad is not None for grad in g) else (None,) * len(wanted)
        return [
            added(reduced(transport, shape), None if shape is None else self._second(node, edge, first))
            for edge, shape, transport, first in zip(node.next_functions, wanted, transports, firsts, strict=True)
        ]

    def _transports(self, node: Any, s: Curvatures) -> Curvatures:
        transports: Curvatures = [None] * len(node.next_functions)
        for i, entry in enumerate(s):  # one output at a time: an element may feed several, each on its own
            if entry is not None:
                found = self._transport(node, [entry if i == j else None for j in range(len(s))])
                transports = [added(total, one) for total, one in zip(transports, found, strict=True)]
        return transports

    def _transport(self, node: Any, s: Curvatures) -> Curvatures:
        slopes = separate_slopes(node, s) if self._looks else None
        if slopes is not None:
            pairs = zip(slopes, pull(node, *s), strict=True)
            return [None if slope is None or moved is None else slope * moved for slope, moved in pairs]
        self._refuse_large(node, sum(entry.numel() for entry in s if entry is not None))
        transports: Curvatures = [None] * len(node.next_functions)
        for outputs, weight in _unit_vectors(s):
            rows = [None if row is None else weight * row.square() for row in pull(node, *outputs)]
            transports = [added(total, row) for total, row in zip(transports, rows, strict=True)]
        return transports

    def _second(self, node: Any, edge: Any, first: Tensor | None) -> Tensor | None:
        """d first_i / d x_i for every i."""
        if first is None or not first.requires_grad:
            return None
        like = torch.zeros_like(first, memory_format=torch.contiguous_format, requires_grad=False)
        found = diagonal_of(lambda weights: _differentiated(node, edge, first, weights), like) if self._looks else None
        if found is not None:
            return found
        self._refuse_large(node, like.numel())
        for i in range(first.numel()):
            unit = torch.zeros_like(like)
            unit.view(-1)[i] = 1.0
            row = _differentiated(node, edge, first, unit)
            if row is not None:
                like.view(-1)[i] = row.reshape(-1)[i]
        return like

    @property
    def _looks(self) -> bool:
        return self.traced_as_elementwise or not is_traced()

    def _refuse_large(self, node: Any, size: int) -> None:
        if size > _LIMIT:
            raise NotImplementedError(
                f"{node.name()} is not element-wise and works on {size} elements, too many to go through one by one "
                f"(the limit is {_LIMIT}): pass missing='sample', or register a rule for it."
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


def _weighted(node: Any, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
    """Jᵀg as a function of the inputs; raises where a Function says that it is not to be differentiated again."""
    firsts = pull_weighted(node, *[None if grad is None else grad.detach().requires_grad_() for grad in g])
    if any(first is not None and first.grad_fn is not None and first.grad_fn.name() == _ERROR for first in firsts):
        raise NotImplementedError(f"{node.name()} is marked once_differentiable, so it needs a rule.")
    with torch.enable_grad():  # a node leaves it to torch's engine to sum over what was broadcast
        return [reduced(first, shape) for first, shape in zip(firsts, wanted, strict=True)]


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
        firsts = _weighted(node, g, wanted) if any(grad is not None for grad in g) else (None,) * len(wanted)
        return [
            added(reduced(transport, shape), None if shape is None else self._residual(node, edge, first))
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
