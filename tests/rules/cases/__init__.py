"""The rows of the table of rule tests, by subject."""

from ..case import Case
from . import (
    activation,
    arithmetic,
    convolution,
    elementwise,
    embedding,
    in_place,
    linear_algebra,
    losses,
    matmul,
    normalization,
    pooling,
    reduction,
    selection,
)

CASES: list[Case] = [
    *activation.CASES,
    *arithmetic.CASES,
    *convolution.CASES,
    *elementwise.CASES,
    *embedding.CASES,
    *in_place.CASES,
    *linear_algebra.CASES,
    *losses.CASES,
    *matmul.CASES,
    *normalization.CASES,
    *pooling.CASES,
    *reduction.CASES,
    *selection.CASES,
]
