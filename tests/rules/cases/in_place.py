"""Rows for writes into a tensor or a view of it."""

from typing import Any

import torch
import torch.nn.functional as F

from ..case import Case, randn

x, v = randn(3, 4), randn(3, seed=1)
NODE = "torch::autograd::CopySlices"


def written(t: Any, values: Any) -> Any:
    result = t.clone()
    result[:, 1] = values
    return result


def changed(operation: Any) -> Any:
    def call(t: Any, *others: Any) -> Any:
        result = t.clone()
        operation(result[1:], *others)
        return result

    return call


CASES = [
    Case("ToCopyBackward0", lambda t: t.to(t.dtype, copy=True), x),
    Case(NODE, written, x, v),
    Case(NODE, written, x, randn(1, seed=2), label="broadcast"),
    Case(NODE, lambda t: written(t, 2.0), x, label="constant"),
    Case(NODE, changed(torch.tanh_), x, label="tanh"),
    Case(NODE, changed(lambda part, other: part.mul_(other)), x, randn(2, 4, seed=3), label="mul"),
    Case(NODE, lambda t: F.pad(t, (1, 2, 1, 1), mode="circular"), randn(1, 2, 3, 4), label="circular"),
    Case("torch::autograd::CopyBackwards", lambda t, u: t.clone().copy_(u), x, randn(3, 4, seed=3)),
]
