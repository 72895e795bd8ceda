"""Rows for reductions and for functions coupled over a dimension."""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from ..case import Case, constant, distinct, randn

x, cube = randn(3, 4), randn(2, 3, 4)
y = randn(4, seed=1)
zeros = randn(3, 4)
with torch.no_grad():
    zeros[0, 1] = zeros[1] = 0.0
norm = torch.linalg.vector_norm

wide = randn(3, 4, seed=2)
with torch.no_grad():
    wide *= 300
UPPER = tuple(torch.triu_indices(3, 3, offset=1))


def plain_cdist(p: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The same in operations that torch can differentiate twice."""
    return lambda a, b: (a.unsqueeze(-2) - b.unsqueeze(-3)).abs().pow(p).sum(-1).pow(1 / p)


def plain_pdist(a: Tensor) -> Tensor:
    return (a[UPPER[0]] - a[UPPER[1]]).abs().pow(3).sum(-1).pow(1 / 3)


CASES = [
    Case("SumBackward0", torch.sum, x),
    Case("SumBackward1", lambda t: t.sum((0, 2), keepdim=True), cube),
    Case("NansumBackward0", torch.nansum, x),
    Case("MeanBackward0", torch.mean, x),
    Case("MeanBackward1", lambda t: t.mean((0, -1)), cube),
    Case("CumsumBackward0", lambda t: t.cumsum(1), x),
    Case("TraceBackward0", torch.trace, randn(4, 4)),
    Case("VarBackward0", torch.var, x),
    Case("VarBackward0", lambda t: t.var((0, -1), correction=0, keepdim=True), cube, label="dims"),
    Case("VarBackward0", lambda t: t.var(1, correction=2), cube, label="correction"),
    Case("StdBackward0", torch.std, x),
    Case("StdBackward0", lambda t: t.std((-1, 0), correction=0), cube, label="dims"),
    Case("VarMeanBackward0", lambda t: torch.var_mean(t, 1), cube),
    Case("VarMeanBackward0", lambda t: torch.var_mean(t, -1)[1], cube, label="mean-only"),
    Case("StdMeanBackward0", lambda t: torch.std_mean(t, (0, 1), keepdim=True), cube),
    Case("StdMeanBackward0", lambda t: torch.std_mean(t, -1)[0], cube, label="std-only"),
    Case("LinalgVectorNormBackward0", norm, x),
    Case("LinalgVectorNormBackward0", lambda t: norm(t, 1, dim=1), x, label="1"),
    Case("LinalgVectorNormBackward0", lambda t: norm(t, 3, dim=(0, 2), keepdim=True), cube, label="3"),
    Case("LinalgVectorNormBackward0", lambda t: norm(t, 1.5, dim=-1), cube, label="1.5"),
    Case("LinalgVectorNormBackward0", lambda t: norm(t, inf, dim=1), distinct(3, 4), label="inf"),
    Case("LinalgVectorNormBackward0", lambda t: norm(t, inf, dim=1), randn(4, 1), label="inf-of-one"),
    Case("LinalgVectorNormBackward0", lambda t: norm(t, 0, dim=1), x, label="0"),
    Case("NormBackward0", lambda t: torch.ops.aten.norm.Scalar(t, 3), x),
    Case("NormBackward1", torch.pairwise_distance, x, constant(y)),
    Case("DistBackward0", lambda s, t: torch.dist(s, t, 3), x, y),
    Case(
        "EuclideanDistBackward0",
        lambda a, b: torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist"),
        randn(3, 4),
        randn(5, 4, seed=1),
        reference=lambda a, b: (a[:, None] - b).square().sum(-1).sqrt(),
    ),
    Case("CdistBackward0", torch.cdist, cube, randn(2, 2, 4, seed=1), reference=plain_cdist(2)),
    Case(
        "CdistBackward0",
        lambda a, b: torch.cdist(a, b, p=3),
        x,
        randn(5, 4, seed=1),
        reference=plain_cdist(3),
        label="3",
    ),
    Case("PdistBackward0", lambda a: torch.pdist(a, p=3), x, reference=plain_pdist),
    Case("LogcumsumexpBackward0", lambda t: t.logcumsumexp(1), x),
    Case("LogcumsumexpBackward0", lambda t: t.logcumsumexp(0), wide, label="wide"),
    Case("ProdBackward0", torch.prod, x),
    Case("ProdBackward0", torch.prod, zeros, label="zeros"),
    Case("ProdBackward1", lambda t: t.prod(-1, keepdim=True), cube),
    Case("ProdBackward1", lambda t: t.prod(0), zeros, label="zeros"),
    Case("CumprodBackward0", lambda t: t.cumprod(-1), x),
    Case("CumprodBackward0", lambda t: t.cumprod(0), zeros, label="zeros"),
    Case("LogsumexpBackward0", lambda t: t.logsumexp(1), x),
    Case("LogsumexpBackward0", lambda t: t.logsumexp((0, -1), keepdim=True), cube, label="dims"),
    Case("SoftmaxBackward0", lambda t: t.softmax(-1), x),
    Case("SoftmaxBackward0", lambda t: t.softmax(1), cube, label="inner-dim"),
    Case("SafeSoftmaxBackward0", lambda t: torch.ops.aten._safe_softmax(t, -1), x),
    Case("LogSoftmaxBackward0", lambda t: t.log_softmax(-1), x),
    Case("LogSoftmaxBackward0", lambda t: t.log_softmax(0), cube, label="first-dim"),
]
