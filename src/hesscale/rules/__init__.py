"""What every operation does to curvature. One file, one subject; importing this package fills the table."""

from . import (
    activation,
    arithmetic,
    convolution,
    elementwise,
    embedding,
    in_place,
    interpolation,
    linear_algebra,
    losses,
    matmul,
    normalization,
    pooling,
    recurrent,
    reduction,
    selection,
)
from .attention import BL89_ATTENTION
from .softmax import BL89_SOFTMAX
from .table import RULES as RULES
from .table import register as register

BL89 = RULES.overlay(BL89_SOFTMAX).overlay(BL89_ATTENTION)
