"""Complex tensors inside a network: rotary embeddings against the same in real operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hesscale

from .case import constant, randn


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """As in Llama 4: pairs of features as complex numbers, times e^(iθ)."""
    pairs = torch.view_as_complex(_pairs(x.float() if x.dtype is torch.bfloat16 else x))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.view_as_real(turned).flatten(3).to(x.dtype)


def _pairs(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, 2)


def rotated_by_parts(x: Tensor, angles: Tensor) -> Tensor:
    first, second = _pairs(x).unbind(-1)
    cosine, sine = angles.cos()[None, :, None], angles.sin()[None, :, None]
    return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1).flatten(3)


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
def test_rotary_embedding(method: str) -> None:
    """Queries and keys of an attention layer; the parts' curvatures add up where they are written as real numbers."""
    x, weight, angles = constant(randn(2, 5, 6)), randn(6, 6, seed=1), constant(randn(5, 2, seed=2))
    found = []
    for rotate in (rotated, rotated_by_parts):
        heads = (x @ weight).reshape(2, 5, 1, 6)[..., :4]
        queries = rotate(heads, angles).transpose(1, 2)
        scores = (queries @ constant(randn(2, 1, 4, 5, seed=3))).softmax(-1)
        found.append(hesscale.diagonal(scores.square().sum(), weight, method=method)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


def test_half_precision_around_complex_numbers() -> None:
    x, angles = constant(randn(2, 5, 1, 4)).bfloat16().requires_grad_(), constant(randn(5, 2)).float()
    y = rotated(x, angles)
    (found,) = hesscale.diagonal(y, x, torch.zeros_like(y), torch.ones_like(y))
    assert found is not None
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5)  # a rotation keeps sums of squares


def test_check_lists_complex_operations() -> None:
    report = hesscale.check(torch.fft.fft(randn(4)).abs().sum())
    assert "AbsBackward0 (complex)" in report.missing
    assert any(name.startswith("Fft") for name in report.missing)
    report = hesscale.check(rotated(randn(2, 5, 1, 4), constant(randn(5, 2))).sum())
    assert not report.missing
    assert "MulBackward0 (complex)" in report.exact


@pytest.mark.parametrize("missing", ["exact", "sample"])
def test_no_fallback_for_complex_numbers(missing: str) -> None:
    """It would take them for real ones."""
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(hesscale.MissingRuleError, match="complex"):
        hesscale.backward(torch.fft.fft(randn(4)).abs().sum(), missing=missing, generator=generator)  # type: ignore[arg-type]


def test_a_complex_square_is_two_paths() -> None:
    """Not an element-wise region: its two parts are coupled. Node by node, as any product of two that meet again."""
    x = randn(3, 2)
    z = torch.view_as_complex(x)
    y = torch.view_as_real(z * z)
    (found,) = hesscale.diagonal(y, x, torch.zeros_like(y), torch.ones_like(y))
    size = constant(x).square().sum(-1, keepdim=True)
    torch.testing.assert_close(found, (2 * size).expand(3, 2), rtol=1e-10, atol=1e-10)
