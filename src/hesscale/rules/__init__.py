"""What every operation does to curvature. One file, one subject; importing this package fills the table."""

from . import (
    activation,
    arithmetic,
    convolution,
    elementwise,
    in_place,
    interpolation,
    losses,
    matmul,
    pooling,
    reduction,
    selection,
)
from .softmax import BL89 as BL89
from .table import RULES as RULES
from .table import register as register
