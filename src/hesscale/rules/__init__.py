"""What every operation does to curvature. One file, one subject; importing this package fills the table."""

from . import (
    activation,
    arithmetic,
    complex_numbers,
    convolution,
    ctc,
    double_backward,
    elementwise,
    embedding,
    in_place,
    interpolation,
    linear_algebra,
    losses,
    matmul,
    normalization,
    pooling,
    quantization,
    recurrent,
    reduction,
    selection,
    special,
)
from .attention import BL89_ATTENTION
from .softmax import BL89_SOFTMAX
from .table import RULES as RULES
from .table import register as register
from .table import registered as registered

BL89 = RULES.overlay(BL89_SOFTMAX).overlay(BL89_ATTENTION)
