"""Every rule against torch's exact second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hesscale
from hesscale.fast import chunking
from hesscale.graph import graph_behind
from hesscale.rules import RULES
from hesscale.rules.families import Elementwise
from hesscale.testing import check_rule

from ..versions import has_rule
from .case import Case
from .cases import ALL, CASES

CONTIGUOUS_ONLY = {
    "AsStridedBackward0",
    "AsStridedBackward0_copy",
    "AsStridedScatterBackward0",
    "ReshapeAliasBackward0_copy",
    "NativeGroupNormBackward0-statistics",
    "NllLoss2DBackward0",
    "NllLoss2DBackwardBackward0",
    "ReshapeAliasBackward0",
    "UnsafeViewBackward0",
    "ViewBackward0",
}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)


def node_names(output: object) -> set[str]:
    """The names of all nodes a function's output was made by."""
    outputs: Any = output if isinstance(output, (tuple, list)) else (output,)
    return {row[0] for t in outputs if t.grad_fn for row in graph_behind(t.grad_fn).rows}


# fused kernels are compared with the same steps in plain operations, in test_attention.py and test_recurrent.py
FUSED = {name for name in RULES if not RULES[name].exact}
# kernels of other devices and precisions, in test_other_devices.py
ELSEWHERE = {"CudnnBatchNormBackward0", "FusedRmsNormBackward0", "GroupedMmBackward0", "MiopenBatchNormBackward0"}
ELSEWHERE |= {"RegisterPostBackwardFunctionBackward", "_DDPSinkBackward"}  # tests/test_distributed.py
BY_CLASS = {key for key in RULES if isinstance(key, type)}  # tests/compiled


def test_every_registered_rule_has_a_row() -> None:
    assert {case.node for case in ALL if has_rule(case.node)} == set(RULES) - FUSED - ELSEWHERE - BY_CLASS


@each_case
def test_row_is_about_its_node(case: Case) -> None:
    assert case.node in node_names(case.function(*case.inputs))


@each_case
def test_rule_is_exact(case: Case) -> None:
    check_rule(case.function, *case.inputs, reference=case.reference)


@each_case
def test_rule_is_exact_on_strided_inputs(case: Case) -> None:
    if case.node in CONTIGUOUS_ONLY or case.label in CONTIGUOUS_ONLY:
        pytest.skip("torch itself wants a contiguous input here")
    check_rule(case.function, *map(strided, case.inputs), reference=case.reference, seed=1)


PIECEWISE = {
    "LogSoftmaxBackward0",
    "NativeBatchNormBackward0",
    "NativeLayerNormBackward0",
    "SafeSoftmaxBackward0",
    "SoftmaxBackward0",
}
PIECEWISE |= {name for name, rule in RULES.items() if isinstance(rule, Elementwise) and rule.by_parts}


@pytest.mark.parametrize("case", [case for case in CASES if case.node in PIECEWISE], ids=lambda case: case.label)
def test_rule_is_exact_piece_by_piece(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "_CACHED", 1)
    check_rule(case.function, *case.inputs, reference=case.reference, seed=2)


def strided(value: object) -> object:
    """The same tensor with gaps between its elements and its dimensions stored in reverse."""
    if not isinstance(value, Tensor) or value.dim() == 0 or not value.is_floating_point():
        return value
    storage = value.new_zeros([*value.shape[::-1][:-1], value.shape[0] * 2])
    view = storage[..., ::2].permute(*reversed(range(value.dim())))
    with torch.no_grad():
        view.copy_(value)
    return view.detach().requires_grad_(value.requires_grad)


@each_case
def test_rule_in_single_precision(case: Case) -> None:
    """float32 in, float32 out, and the same numbers up to its rounding."""
    exact = curvatures(case, torch.float64)
    single = curvatures(case, torch.float32)
    for ours, theirs in zip(single, exact, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-3, atol=2e-4 * float(theirs.abs().max().clamp_min(1)))


def curvatures(case: Case, dtype: torch.dtype) -> list[Tensor]:
    inputs = [
        value.detach().to(dtype).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in case.inputs
    ]
    outputs = case.function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else [out for out in outputs if out.requires_grad]
    y = torch.cat([out.reshape(-1) for out in outputs])
    y = y.to(dtype)
    generator = torch.Generator().manual_seed(3)
    g, s = (torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    found = hesscale.diagonal(y, leaves, g, s)
    return [torch.zeros_like(leaf) if c is None else c for c, leaf in zip(found, leaves, strict=True)]
