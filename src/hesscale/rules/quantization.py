"""Quantization-aware training: values are rounded, and gradients pass straight through, or not at all out of range."""

from .families import Selection
from .table import register

register(
    Selection(linear=False, pointwise=True),  # slopes of 0 and 1, as torch's own backward has them
    "FakeQuantizePerChannelAffineCachemaskBackward0",
    "FakeQuantizePerTensorAffineCachemaskBackward0",
    "FakeQuantizePerTensorAffineCachemaskTensorQparamsBackward0",
)
register(Selection(linear=False), "FusedMovingAvgObsFqHelperBackward0")
