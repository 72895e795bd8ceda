"""Fused attention, y = softmax(c·QKᵀ + mask) V: what the kernel did not save is computed again, some heads at a time.

The kernel is three steps, and curvature passes them as it would if they stood in the model: product, softmax, product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..fast.chunking import chunk_size, chunks
from .calculus import added
from .families import Coupled, Curvatures
from .probabilities import spread, through_softmax
from .table import register

_ROWS = 128  # of an attention matrix that are worth a matrix product

_DROPOUT = (
    "This fused attention kernel drops weights at random and does not say which: train without attention dropout, or "
    "use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)

Softmax = Callable[[Tensor, Tensor | None, Tensor | None], Tensor | None]


def elementwise(q: Tensor, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Softmax as Becker & LeCun (1989) would have it:  f' = q − q²,  f'' = f'(1 − 2q)."""
    first = spread(q, -1)
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
        mask = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        # several query heads may read one key and value: [batch, groups, heads per group, length, width]
        split = (key.shape[1], -1)
        q, (s, g, mask) = query.unflatten(1, split), (t if t is None else t.unflatten(1, split) for t in (s, g, mask))
        found = [torch.zeros_like(t) for t in (q, key, value)]
        for some, rows in _parts(q.shape, key.shape[2], chunk_size(query)):
            # heads of one tensor often lie between each other, and matrix products would copy them again and again
            q_part, k, v = q[rows].contiguous(), *(t[some].unsqueeze(2).contiguous() for t in (key, value))
            seeds = (t if t is None else t[rows].contiguous() for t in (s, g))
            above = rows[-1].start if node._saved_is_causal else None
            p = _weights(q_part, k, mask if mask is None else mask[rows], scale, above)
            parts = _steps(q_part, k, v, p, *seeds, scale=scale, softmax=softmax)
            for total, where, part in zip(found, (rows, some, some), parts, strict=True):
                if part is not None:
                    total[where] += part
        return found[0].flatten(1, 2), *found[1:]

    return curvature


def _parts(shape: torch.Size, keys: int, size: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Examples, groups of heads, or rows of a group's attention matrices, of ``size`` elements together.

    As an index of keys and values, and one of queries.
    """
    batch, groups, heads, length, _ = shape
    of_row = max(heads * keys, 1)
    of_group = max(of_row * length, 1)
    for examples in chunks(batch, size // (of_group * groups)):
        for some in chunks(groups, size // of_group):
            for rows in chunks(length, max(_ROWS, size // of_row)):
                yield (examples, some), (examples, some, slice(None), rows)


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
    s_v = None if s is None else _over_heads(p.square_().mT @ s)
    if s_a is None:
        return None, None, s_v
    k2, q2 = (scale * k).square_(), (scale * q).square_()
    return s_a @ k2, _over_heads(s_a.mT @ q2), s_v


def _over_heads(x: Tensor) -> Tensor:
    """Summed over the query heads that read one key and value."""
    return x.sum(2) if x.shape[2] != 1 else x.squeeze(2)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, above: int | None) -> Tensor:
    """softmax(c·QKᵀ + mask); a row that is masked altogether has no weights. ``above``: rows before, if causal."""
    logits = (scale * q) @ k.mT
    if above is not None:
        ones = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
        logits.masked_fill_(~ones.tril(above), -math.inf)
    if mask is None:
        return logits.softmax(-1)
    logits = logits.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else logits.add_(mask)
    return logits.softmax(-1).nan_to_num_()


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
