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


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_TANH", "RNN_RELU"])
def test_recurrent_layers_on_cuda(kind: str, batch_first: bool, residual: bool) -> None:
    torch.manual_seed(0)
    mode = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU").index(kind)
    options = {"nonlinearity": kind[4:].lower()} if mode < 2 else {}
    module: Any = getattr(nn, kind[:3] if mode < 2 else kind)
    layer = module(4, 5, 2, bidirectional=True, batch_first=batch_first, **options).double()
    x = randn(3, 6, 4)
    states = [randn(4, 3 if batch_first else 6, 5, seed=i) for i in range(2 if kind == "LSTM" else 1)]
    flat = [p for group in layer.all_weights for p in group]
    made = node(
        "CudnnRnnBackward0",
        3 + len(flat),
        **{"input": constant(x), "weight": [*map(constant, flat)], "weight_stride0": 4},
        **{"hx": constant(states[0]), "cx": constant(states[1]) if len(states) > 1 else None, "proj_size": 0},
        **{"mode": mode, "batch_first": batch_first, "dropout": 0.0, "num_layers": 2},
        **{"train": True, "bidirectional": True, "batch_sizes": ()},
    )
    inputs = [x, *flat, *states]
    outputs, last = layer(x, tuple(states) if len(states) > 1 else states[0])
    results = [outputs, *(last if isinstance(last, tuple) else (last,))]
    (g, s), nothing = zip(*map(seeds, results), strict=True), [None] * (3 - len(results))
    found = RULES[made.name()](
        made,
        [*s, *nothing],
        [*g, *nothing] if residual else [None] * 3,
        [tensor.shape for tensor in inputs] + [None] * (2 - len(states)),
    )
    y, gradient, curvature = (torch.cat([t.flatten() for t in each]) for each in (results, g, s))
    expected = hesscale.diagonal(y, inputs, gradient if residual else torch.zeros_like(y), curvature)
    torch.testing.assert_close(tuple(found[: len(inputs)]), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("refused", [{"dropout": 0.1}, {"batch_sizes": (2, 1)}, {"proj_size": 3}])
def test_what_a_kernel_on_cuda_does_not_tell(refused: dict[str, Any]) -> None:
    saved = {"dropout": 0.0, "train": True, "num_layers": 2, "batch_sizes": (), "proj_size": 0} | refused
    made = node("CudnnRnnBackward0", 11, batch_first=False, **saved)
    with pytest.raises(NotImplementedError, match="cuDNN"):
        RULES[made.name()](made, [torch.ones(1)] * 3, [None] * 3, [None] * 11)


def test_grouped_products_of_experts() -> None:
    """In single precision: the kernel knows no other here."""
    a, b = (t.detach().float().requires_grad_() for t in (randn(7, 4), randn(3, 4, 4, seed=1)))
    grouped = torch._grouped_mm(a, b, offs=torch.tensor([2, 5, 7], dtype=torch.int32))
    steps = torch.cat([a[:2] @ b[0], a[2:5] @ b[1], a[5:] @ b[2]])
    g, s = seeds(steps)
    found, expected = hesscale.diagonal(grouped, (a, b), g, s), hesscale.diagonal(steps, (a, b), g, s)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
