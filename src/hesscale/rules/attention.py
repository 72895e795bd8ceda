"""Fused attention, y = softmax(c·QKᵀ + mask) V: what the kernel did not save is computed again, some heads at a time.

The kernel is three steps, and curvature passes them as it would if they stood in the model: product, softmax, product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .calculus import added, through_softmax
from .families import Coupled, Curvatures
from .table import register

_ELEMENTS = 2**22  # of attention matrices held at a time: as many heads as fit, at least one

_DROPOUT = (
    "This fused attention kernel drops weights at random and does not say which: train without attention dropout, or "
    "use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)

Softmax = Callable[[Tensor, Tensor | None, Tensor | None], Tensor | None]


def elementwise(q: Tensor, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Softmax as Becker & LeCun (1989) would have it:  f' = q − q²,  f'' = f'(1 − 2q)."""
    first = q - q * q
    transport = None if s is None else first.square() * s
    return added(transport, None if g is None else first * (1 - 2 * q) * g)


def attention(softmax: Softmax) -> Callable[[Any, Tensor | None, Tensor | None], Curvatures]:
    """The rule of a fused kernel for a given way to pass softmax."""

    def curvature(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
        if getattr(node, "_saved_dropout_p", 0.0):
            raise NotImplementedError(_DROPOUT)
        query, key, value = node._saved_query, node._saved_key, node._saved_value
        scale = node._saved_scale if node._saved_scale is not None else 1 / math.sqrt(query.shape[-1])
        mask = _mask(node)
        # several query heads may read one key and value: [batch, groups, heads per group, length, width]
        q, s_y, g_y = (None if t is None else t.unflatten(1, (key.shape[1], -1)) for t in (query, s, g))
        k, v = key.unsqueeze(2), value.unsqueeze(2)
        assert q is not None
        mask = None if mask is None else mask.expand(*query.shape[:3], key.shape[2]).unflatten(1, (key.shape[1], -1))
        results = [torch.zeros_like(t) for t in (query.unflatten(1, (key.shape[1], -1)), key, value)]
        for part in _parts(q.shape, key.shape[2]):
            seeds = (None if t is None else t[part] for t in (s_y, g_y))
            weights = _weights(q[part], k[part], None if mask is None else mask[part], scale, node._saved_is_causal)
            curvatures = _steps(q[part], k[part], v[part], weights, *seeds, scale=scale, softmax=softmax)
            for result, found in zip(results, curvatures, strict=True):
                if found is not None:
                    result[part] = found
        return [results[0].flatten(1, 2), *results[1:]]

    return curvature


def _parts(shape: torch.Size, keys: int) -> Iterator[tuple[slice, slice]]:
    """Examples, or groups of heads of one example, whose attention matrices fit into memory together."""
    batch, groups, heads, length, _ = shape
    each = max(heads * length * keys, 1)
    examples, some = max(1, _ELEMENTS // (groups * each)), min(groups, max(1, _ELEMENTS // each))
    for example in range(0, batch, examples):
        for group in range(0, groups, some):
            yield slice(example, example + examples), slice(group, group + some)


def _steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    s: Tensor | None,
    g: Tensor | None,
    *,
    scale: float,
    softmax: Softmax,
) -> Curvatures:
    """Curvature of Q, K and V: back through  y = pV,  p = softmax(a),  a = c·QKᵀ."""
    s_p = None if s is None else s @ v.square().mT
    g_p = None if g is None else g @ v.mT
    s_a = softmax(p, s_p, g_p)
    s_v = None if s is None else (p.square().mT @ s).sum(2)
    if s_a is None:
        return None, None, s_v
    return scale**2 * (s_a @ k.square()), scale**2 * (s_a.mT @ q.square()).sum(2), s_v


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """softmax(c·QKᵀ + mask); a row that is masked altogether has no weights."""
    logits = scale * (q @ k.mT)
    if causal:
        ones = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
        logits = logits.masked_fill(~ones.tril(), -math.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else logits + mask
    return logits.softmax(-1).nan_to_num()


def _mask(node: Any) -> Tensor | None:
    mask: Tensor | None = getattr(node, "_saved_attn_mask", None)
    return getattr(node, "_saved_attn_bias", None) if mask is None else mask


_FUSED = (
    "ScaledDotProductCudnnAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductFlashAttentionBackward0",
    "ScaledDotProductFlashAttentionForCpuBackward0",
)


def _padded(rule: Coupled) -> Coupled:
    """The rule for kernels that have more inputs than Q, K and V: a bias, which gets no curvature from them."""

    def curvature(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
        results = rule.curvature(node, s, g)
        assert isinstance(results, (list, tuple))
        extra = node.next_functions[3:]
        if any(child is not None for child, _ in extra):
            raise NotImplementedError("A learned attention bias has no rule in this fused kernel: use the math kernel.")
        return [*results, *(None for _ in extra)]

    return Coupled(curvature, exact=False)


register(_padded(Coupled(attention(through_softmax))), *_FUSED)
BL89_ATTENTION = dict.fromkeys(_FUSED, _padded(Coupled(attention(elementwise))))
