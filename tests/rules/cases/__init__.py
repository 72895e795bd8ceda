"""The rows of the table of rule tests, by subject."""

from ..case import Case
from . import (
    activation,
    arithmetic,
    convolution,
    elementwise,
    in_place,
    losses,
    matmul,
    pooling,
    reduction,
    selection,
)

CASES: list[Case] = [
    *activation.CASES,
    *arithmetic.CASES,
    *convolution.CASES,
    *elementwise.CASES,
    *in_place.CASES,
    *losses.CASES,
    *matmul.CASES,
    *pooling.CASES,
    *reduction.CASES,
    *selection.CASES,
]
