"""Rows for fake quantization: some values in range, some out of it."""

from typing import Any

import torch

from ..case import Case, randn

x = randn(3, 4)
scales, zeros = torch.tensor([0.1, 0.2, 0.15]), torch.tensor([0, 1, -1], dtype=torch.int32)


def observed(t: Any) -> Any:
    """What a fused observer makes of a tensor, with a range that it has seen before."""
    range_ = torch.tensor([-0.8]), torch.tensor([0.9])
    state = torch.tensor([0.1]), torch.tensor([0], dtype=torch.int32)
    off, on = torch.tensor([0]), torch.tensor([1])
    return torch.fused_moving_avg_obs_fake_quant(t, off, on, *range_, *state, 0.01, -8, 7, -1)


CASES = [
    Case(
        "FakeQuantizePerTensorAffineCachemaskBackward0",
        lambda t: torch.fake_quantize_per_tensor_affine(t, 0.1, 1, -8, 7),
        x,
    ),
    Case(
        "FakeQuantizePerTensorAffineCachemaskTensorQparamsBackward0",
        lambda t: torch.fake_quantize_per_tensor_affine(t, scales[0], zeros[0], -8, 7),
        x,
    ),
    Case(
        "FakeQuantizePerChannelAffineCachemaskBackward0",
        lambda t: torch.fake_quantize_per_channel_affine(t, scales, zeros, 0, -8, 7),
        x,
    ),
    Case("FusedMovingAvgObsFqHelperBackward0", observed, x),
]
