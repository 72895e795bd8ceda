"""The rows of the table of rule tests, by subject."""

from ...versions import has_node, has_rule
from ..case import Case
from . import (
    activation,
    arithmetic,
    complex_numbers,
    convolution,
    double_backward,
    elementwise,
    embedding,
    in_place,
    linear_algebra,
    losses,
    matmul,
    normalization,
    pooling,
    quantization,
    reduction,
    selection,
)

ALL: list[Case] = [
    *activation.CASES,
    *arithmetic.CASES,
    *complex_numbers.CASES,
    *convolution.CASES,
    *double_backward.CASES,
    *elementwise.CASES,
    *embedding.CASES,
    *in_place.CASES,
    *linear_algebra.CASES,
    *losses.CASES,
    *matmul.CASES,
    *normalization.CASES,
    *pooling.CASES,
    *quantization.CASES,
    *reduction.CASES,
    *selection.CASES,
]

CASES = [case for case in ALL if has_node(case.node) and has_rule(case.node)]
"""Those that the installed torch can record, and differentiate as often as their rule needs."""
