"""Fused attention against the same three steps in plain operations, which the other rules carry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hesscale
from hesscale.rules import attention
from hesscale.testing import check_rule

from .case import constant, randn
from .test_rules import node_names

FUSED = "ScaledDotProductFlashAttentionForCpuBackward0"
METHODS = ["hesscale", "hesscale_gn", "bl89"]
floats = constant(randn(5, 7, seed=9))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": floats},
    "heads mask": {"attn_mask": constant(randn(2, 1, 5, 7, seed=8))},
    "boolean mask": {"attn_mask": (floats > -0.5).logical_or(torch.eye(5, 7, dtype=torch.bool))},
}


def inputs(keys: int = 7, groups: int = 4) -> list[Tensor]:
    return [randn(2, 4, 5, 8), randn(2, groups, keys, 8, seed=1), randn(2, groups, keys, 6, seed=2)]


def plain(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, scale: Any = None) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = scale * (q @ k.mT)
    if is_causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if attn_mask is not None:
        blocked = attn_mask.dtype is torch.bool
        logits = logits.masked_fill(~attn_mask, -math.inf) if blocked else logits + attn_mask
    return logits.softmax(-1) @ v


def diagonals(y: Tensor, tensors: list[Tensor], method: str) -> tuple[Tensor | None, ...]:
    generator = torch.Generator().manual_seed(0)
    g, s = (torch.randn(y.shape, generator=generator, dtype=y.dtype) for _ in range(2))
    return hesscale.diagonal(y, tensors, g, s, method=method)


def assert_same(fused: Tensor, steps: Tensor, tensors: list[Tensor], method: str) -> None:
    torch.testing.assert_close(fused, steps, rtol=1e-10, atol=1e-10)
    assert FUSED in node_names(fused)
    found, expected = diagonals(fused, tensors, method), diagonals(steps, tensors, method)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OPTIONS)
def test_fused_is_plain(name: str, method: str) -> None:
    q, k, v = inputs()
    v = randn(2, 4, 7, 8, seed=2)
    fused = F.scaled_dot_product_attention(q, k, v, **OPTIONS[name])
    assert_same(fused, plain(q, k, v, **OPTIONS[name]), [q, k, v], method)


@pytest.mark.parametrize("method", METHODS)
def test_causal(method: str) -> None:
    q, k, v = randn(2, 4, 6, 8), randn(2, 4, 6, 8, seed=1), randn(2, 4, 6, 8, seed=2)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_same(fused, plain(q, k, v, is_causal=True), [q, k, v], method)


def test_grouped_queries() -> None:
    q, k, v = randn(2, 4, 5, 8), randn(2, 2, 7, 8, seed=1), randn(2, 2, 7, 8, seed=2)
    fused = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_same(fused, plain(q, k, v), [q, k, v], "hesscale")


@pytest.mark.parametrize("rows", [1, 3, 128])
@pytest.mark.parametrize("size", [1, 35, 100, 300])  # a head's attention matrix has 35 elements
@pytest.mark.parametrize("kind", ["plain", "causal", "masked", "grouped"])
def test_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch, kind: str, size: int, rows: int) -> None:
    """Some heads, or some rows of a head at a time: the result is the same."""
    groups = 2 if kind == "grouped" else 4
    q, k, v = randn(2, 4, 5, 8), randn(2, groups, 7, 8, seed=1), randn(2, groups, 7, 8, seed=2)
    options: dict[str, Any] = {"is_causal": kind == "causal"}
    if kind == "masked":
        options["attn_mask"] = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    monkeypatch.setattr(attention, "chunk_size", lambda _: size)
    monkeypatch.setattr(attention, "_ROWS", rows)
    fused = F.scaled_dot_product_attention(q, k, v, enable_gqa=kind == "grouped", **options)
    assert_same(fused, plain(q, k, v, **options), [q, k, v], "hesscale")


def test_dropout_runs_on_the_math_kernel() -> None:
    q, k, v = randn(2, 4, 5, 8), randn(2, 4, 7, 8, seed=1), randn(2, 4, 7, 8, seed=2)
    torch.manual_seed(0)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    for found in diagonals(y, [q, k, v], "hesscale"):
        assert found is not None
        assert torch.isfinite(found).all()


def test_values_are_exact() -> None:
    """y is linear in V, so nothing is dropped there."""
    q, k, v = (constant(randn(1, 2, 3, 4)), constant(randn(1, 2, 5, 4, seed=1)), randn(1, 2, 5, 4, seed=2))
    check_rule(lambda t: F.scaled_dot_product_attention(q, k, t), v, reference=lambda t: plain(q, k, t))
