"""Rows for matrix products."""

import torch
import torch.nn.functional as F

from ..case import Case, constant, randn

A, B, W, v = randn(3, 4), randn(4, 5, seed=1), randn(5, 4, seed=2), randn(4, seed=3)
bias = randn(5, seed=4)
A3, B3 = randn(2, 3, 4, seed=5), randn(2, 4, 5, seed=6)
n = randn(4, seed=8)

CASES = [
    Case("MmBackward0", torch.mm, A, B),
    Case("MmBackward0", lambda x, w: F.linear(x, w), A, W, label="linear"),
    Case("MmBackward0", torch.mm, A, constant(B), label="left"),
    Case("MmBackward0", lambda x, y: x.t() @ y.t(), randn(4, 3), randn(5, 4, seed=1), label="transposed"),
    Case("AddmmBackward0", F.linear, A, W, bias),
    Case("AddmmBackward0", lambda c, x, y: torch.addmm(c, x, y, beta=2, alpha=3), bias, A, B, label="alpha-beta"),
    Case("AddmmBackward0", F.linear, constant(A), W, bias, label="first-layer"),
    Case("AddmmBackward0", F.linear, A, constant(W), bias, label="frozen-weight"),
    Case("AddmmBackward0", F.linear, randn(2, 3, 4), W, bias, label="three-dim"),
    Case("BmmBackward0", torch.bmm, A3, B3),
    Case("BmmBackward0", torch.matmul, randn(2, 1, 3, 4), randn(3, 4, 2, seed=1), label="broadcast"),
    Case("BmmBackward0", lambda x, y: torch.einsum("bij,bjk->ik", x, y), A3, B3, label="einsum"),
    Case("BaddbmmBackward0", lambda c, x, y: torch.baddbmm(c, x, y, beta=2, alpha=3), randn(3, 1), A3, B3),
    Case("AddbmmBackward0", lambda c, x, y: torch.addbmm(c, x, y, beta=2, alpha=3), randn(3, 5), A3, B3),
    Case("MvBackward0", torch.mv, A, v),
    Case("MvBackward0", torch.matmul, randn(2, 3, 4), v, label="batch"),
    Case("AddmvBackward0", lambda c, x, y: torch.addmv(c, x, y, beta=2, alpha=3), randn(3), A, v),
    Case("AddrBackward0", lambda c, x, y: torch.addr(c, x, y, beta=2, alpha=3), A, randn(3), v),
    Case("TrilinearBackward0", F.bilinear, A, randn(3, 5, seed=1), randn(2, 4, 5, seed=2)),
    Case("DotBackward0", torch.dot, v, n),
    Case("DotBackward0", lambda x: torch.dot(x, x), v, label="self"),
    Case("VdotBackward0", torch.vdot, v, n),
]
