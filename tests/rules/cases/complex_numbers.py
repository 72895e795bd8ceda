"""Rows for complex tensors: from real ones and back to real ones."""

from typing import Any

import torch

from ..case import Case, constant, randn

z = randn(3, 4, 2)
w = randn(3, 4, 2, seed=1)
real = randn(3, 4, seed=2)
phases = torch.polar(constant(randn(4, seed=3)).abs(), constant(randn(4, seed=4)))


def between(function: Any) -> Any:
    """The function of complex numbers as one of pairs of real numbers."""

    def call(*pairs: Any) -> Any:
        results = function(
            *(torch.view_as_complex(pair.contiguous()) if pair.shape[-1] == 2 else pair for pair in pairs)
        )
        results = results if isinstance(results, (tuple, list)) else [results]
        return [torch.view_as_real(result.resolve_conj()) for result in results]

    return call


def constants(t: Any) -> Any:
    return phases.to(torch.complex128 if t.dtype is torch.float64 or t.dtype is torch.complex128 else torch.complex64)


MOVES = {
    "CatBackward0": lambda c: torch.cat([c, c[:1]]),
    "CloneBackward0": torch.clone,
    "ExpandBackward0": lambda c: c.expand(2, 3, 4),
    "FlipBackward0": lambda c: c.flip(0),
    "GatherBackward0": lambda c: c.gather(1, torch.tensor([[0, 0], [3, 1], [2, 2]])),
    "IndexBackward0": lambda c: c[torch.tensor([0, 2, 2])],
    "IndexSelectBackward0": lambda c: c.index_select(0, torch.tensor([1, 1])),
    "PermuteBackward0": lambda c: c.permute(1, 0),
    "RepeatBackward0": lambda c: c.repeat(2, 1),
    "ReshapeAliasBackward0": lambda c: torch.ops.aten._reshape_alias(c, [4, 3], [3, 1]),
    "RollBackward0": lambda c: c.roll(1),
    "SelectBackward0": lambda c: c[1],
    "SliceBackward0": lambda c: c[1:],
    "SplitBackward0": lambda c: c.split(2),
    "SplitWithSizesBackward0": lambda c: c.split([1, 2]),
    "SqueezeBackward0": lambda c: c[:1].squeeze(),
    "SqueezeBackward1": lambda c: c[:1].squeeze(0),
    "StackBackward0": lambda c: torch.stack([c, c], -1),
    "SumBackward0": torch.sum,
    "SumBackward1": lambda c: c.sum(0),
    "TBackward0": torch.t,
    "TransposeBackward0": lambda c: c.transpose(0, 1),
    "UnbindBackward0": lambda c: c.unbind(1),
    "UnsafeViewBackward0": lambda c: torch.ops.aten._unsafe_view(c, [4, 3]),
    "UnsqueezeBackward0": lambda c: c.unsqueeze(1),
    "ViewBackward0": lambda c: c.view(2, 6),
    "ConjBackward0": torch.conj,
    "ConjPhysicalBackward0": torch.conj_physical,
    "NegBackward0": torch.neg,
}
CASES = [
    *(Case(f"{name} (complex)", between(function), z) for name, function in MOVES.items()),
    Case("ViewAsComplexBackward0 (complex)", between(lambda c: c), z),
    Case("ViewAsRealBackward0 (complex)", between(lambda c: c), z),
    Case(
        "ViewAsRealBackward0 (complex)", lambda t: torch.view_as_complex(t.contiguous()).imag, z, label="imaginary part"
    ),
    Case("ComplexBackward0 (complex)", between(torch.complex), real, randn(3, 4, seed=5)),
    Case("MulBackward0 (complex)", between(torch.mul), z, w),
    Case("MulBackward0 (complex)", between(lambda c: c * constants(c)), z, label="constants"),
    Case("MulBackward0 (complex)", between(lambda t: t * constants(t)), real, label="real variable"),
    Case("MulBackward0 (complex)", between(torch.mul), z, randn(3, 1, seed=6), label="real factor"),
    Case("MulBackward0 (complex)", between(lambda c: c * (0.5 - 2j)), z, label="number"),
    Case("AddBackward0 (complex)", between(lambda c, t: torch.add(c, t, alpha=3)), z, real),
    Case("SubBackward0 (complex)", between(torch.sub), z, randn(1, 4, 2, seed=7)),
]
