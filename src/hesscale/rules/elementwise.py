"""Functions of one variable."""
from __future__ import annotations
from typing import Any
from .families import Elementwise, Pair
from .table import register

def tanh(node: Any) -> Pair:
    y = node._saved_result
    return None, -2 * y * (1 - y * y)
def sigmoid(node: Any) -> Pair:
    y = node._saved_result
    return None, y * (1 - y) * (1 - 2 * y)
def mul(node):
    return (node._saved_other, None), (node._saved_self, None)
def add(node):
    return (1.0, None), (node._saved_alpha, None)
register(Elementwise(tanh), "TanhBackward0")
register(Elementwise(sigmoid), "SigmoidBackward0")
register(Elementwise(mul, linear=((0,),(1,))), "MulBackward0")
register(Elementwise(add, linear=((0,1),)), "AddBackward0")
from .families import Selection
register(Selection(),"NllLossBackward0","SumBackward0","SumBackward1")
