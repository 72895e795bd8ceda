"""Kernels that do not run here, on nodes made by hand, against what they compute in plain operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.rules import RULES
from hesscale.rules.families import Rebuilt

from .case import constant, randn
from .test_attention import plain


def seeds(y: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    g, s = (torch.randn(y.shape, generator=generator, dtype=y.dtype) for _ in range(2))
    return g, s


def node(name: str, edges: int, **saved: Any) -> Any:
    attributes = {f"_saved_{key}": value for key, value in saved.items()}
    return SimpleNamespace(name=lambda: name, next_functions=[(object(), 0)] * edges, **attributes)


@pytest.mark.parametrize("name", ["Cudnn", "Efficient", "Flash"])
def test_attention_on_cuda(name: str) -> None:
    q, k, v = randn(2, 4, 5, 8), randn(2, 2, 5, 8, seed=1), randn(2, 2, 5, 8, seed=2)
    y = plain(q, k, v, is_causal=True)
    g, s = seeds(y)
    made = node(
        f"ScaledDotProduct{name}AttentionBackward0",
        3,
        **{"query": q.detach(), "key": k.detach(), "value": v.detach()},
        **{"dropout_p": 0.0, "scale": None, "is_causal": True},
    )
    found = RULES[made.name()](made, [s], [g], [q.shape, k.shape, v.shape])
    torch.testing.assert_close(tuple(found), hesscale.diagonal(y, (q, k, v), g, s), rtol=1e-10, atol=1e-10)


def test_attention_dropout_is_refused() -> None:
    made = node("ScaledDotProductFlashAttentionBackward0", 3, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="MATH"):
        RULES[made.name()](made, [torch.ones(1)], [None], [None] * 3)


def test_rms_norm_on_cuda() -> None:
    x, w = randn(4, 6), randn(6, seed=1)
    inverse = (constant(x).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    saved = {"input": constant(x), "weight": constant(w), "result1": inverse, "normalized_shape": (6,)}
    g, s = seeds(x)
    made = node("FusedRmsNormBackward0", 2, **saved)
    found = RULES[made.name()](made, [s, None], [g, None], [x.shape, w.shape])
    y = F.rms_norm(x, (6,), w, eps=1e-5)
    offset = y - y.detach()
    expected = hesscale.testing.exact_diagonal((g * offset).sum() + (s * offset.square()).sum() / 2, (x, w))
    torch.testing.assert_close(tuple(found), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["Cudnn", "Miopen"])
def test_batch_norm_on_gpus(name: str, training: bool) -> None:
    x, w, b = randn(3, 4, 2, 3), randn(4, seed=1), randn(4, seed=2)
    mean, var = constant(randn(4, seed=3)), constant(randn(4, seed=4)).square() + 0.5
    y = F.batch_norm(x, mean.clone(), var.clone(), w, b, training=training)
    native: Any = y.grad_fn
    g, s = seeds(y)
    made = node(
        f"{name}BatchNormBackward0",
        3,
        **{"input": constant(x), "weight": constant(w), "training": training, "epsilon": 1e-5},
        **{"running_mean": mean, "running_var": var},
        **{"result1": native._saved_result1, "result2": native._saved_result2},
    )
    found = RULES[made.name()](made, [s, None, None], [g, None, None], [x.shape, w.shape, b.shape])
    torch.testing.assert_close(tuple(found), hesscale.diagonal(y, (x, w, b), g, s), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_on_cuda(kind: Any, batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = kind(4, 5, 2, bidirectional=True, batch_first=batch_first).double()
    x = randn(3, 6, 4)
    states = [randn(4, 3 if batch_first else 6, 5, seed=i) for i in range(2 if kind is nn.LSTM else 1)]
    made = node(
        "CudnnRnnBackward0",
        3 + len(list(layer.parameters())),
        **{"input": x, "weight": [p for group in layer.all_weights for p in group], "weight_stride0": 4},
        **{"hx": states[0], "cx": states[1] if len(states) > 1 else None, "proj_size": 0, "num_layers": 2},
        **{"mode": {nn.RNN: 1, nn.LSTM: 2, nn.GRU: 3}[kind], "batch_first": batch_first, "dropout": 0.0},
        **{"train": True, "bidirectional": True, "batch_sizes": ()},
    )
    rule = RULES["CudnnRnnBackward0"]
    assert isinstance(rule, Rebuilt)
    outputs, leaves = rule.rebuild(made)
    expected, last = layer(x, tuple(states) if len(states) > 1 else states[0])
    last = last if isinstance(last, tuple) else (last,)
    for ours, theirs in zip(outputs, (expected, *last), strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert len(leaves) == len(made.next_functions)


def test_grouped_products_of_experts() -> None:
    """In single precision: the kernel knows no other here."""
    a, b = (t.detach().float().requires_grad_() for t in (randn(7, 4), randn(3, 4, 4, seed=1)))
    grouped = torch._grouped_mm(a, b, offs=torch.tensor([2, 5, 7], dtype=torch.int32))
    steps = torch.cat([a[:2] @ b[0], a[2:5] @ b[1], a[5:] @ b[2]])
    g, s = seeds(steps)
    found, expected = hesscale.diagonal(grouped, (a, b), g, s), hesscale.diagonal(steps, (a, b), g, s)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
