"""Reductions with a rule of their own: variance, norms, products, and sums that torch would run in half precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .calculus import added
from .families import Coupled, Curvatures, signed
from .probabilities import complement, spread
from .table import register


def reduced_dims(node: Any, x: Tensor) -> list[int]:
    """The dimensions a reduction ran over; none given means all."""
    dims = getattr(node, "_saved_dim", None)
    return [signed(dim) % max(x.dim(), 1) for dim in dims] if dims else list(range(x.dim()))


def kept(result: Tensor, x: Tensor, dims: Sequence[int]) -> Tensor:
    """A reduced tensor with its dimensions back, of length one."""
    return result.reshape([1 if dim in dims else size for dim, size in enumerate(x.shape)])


def _moments(node: Any) -> tuple[Tensor, list[int], int, float]:
    x = node._saved_self
    dims = reduced_dims(node, x)
    count = max(math.prod(x.shape[dim] for dim in dims), 1)
    correction = 1 if node._saved_correction is None else node._saved_correction
    return x - x.mean(dims, keepdim=True), dims, count, max(count - correction, 0)


def variance(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Σ(x − m)²/d:  4(x − m)²/d² s + 2(1 − 1/n)/d g."""
    x, dims, count, divisor = _moments(node)
    transport = None if s is None else 4 * x.square() * kept(s, x, dims) / divisor**2
    residual = None if g is None else (kept(g, x, dims) * (2 * (1 - 1 / count) / divisor)).expand_as(x)
    return added(transport, residual)


def deviation(node: Any, s: Tensor | None, g: Tensor | None, result: Tensor | None = None) -> Tensor | None:
    """r = √variance:  f' = (x − m)/(dr),  f'' = (1 − 1/n)/(dr) − f'²/r."""
    x, dims, count, divisor = _moments(node)
    r = kept(node._saved_result if result is None else result, x, dims)
    first = (x / (divisor * r)).masked_fill(r == 0, 0.0)  # flat where all are equal, as torch has it
    transport = None if s is None else first.square() * kept(s, x, dims)
    bend = ((1 - 1 / count) / (divisor * r) - first.square() / r).masked_fill(r == 0, 0.0)
    return added(transport, None if g is None else bend * kept(g, x, dims))


def with_mean(spread: Callable[..., Tensor | None]) -> Callable[[Any, Curvatures, Curvatures], Tensor | None]:
    """The rule of an op that returns a spread and the mean:  the spread's curvature + s/n² of the mean."""

    def curvature(node: Any, s: Curvatures, g: Curvatures) -> Tensor | None:
        x = node._saved_self
        dims = reduced_dims(node, x)
        count = math.prod(x.shape[dim] for dim in dims)
        mean = None if s[1] is None else (kept(s[1], x, dims) / count**2).expand_as(x)
        return mean if s[0] is None and g[0] is None else added(spread(node, s[0], g[0]), mean)

    return curvature


def norm(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """r = (Σ|x|^p)^(1/p) over some dimensions."""
    x = node._saved_self
    dims = reduced_dims(node, x)
    s, g = (None if t is None else kept(t, x, dims) for t in (s, g))
    return _norm(x, kept(node._saved_result, x, dims), _order(node), dims, x.shape, s, g)


def distance(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """r = ‖x − y‖_p: the same at both ends, but for broadcasting."""
    x, y = node._saved_self, node._saved_other
    gap = x - y
    dims = range(gap.dim())
    return tuple(_norm(gap, node._saved_result, float(node._saved_p), dims, end.shape, s, g) for end in (x, y))


def all_distances(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """r_ij = ‖x_i − y_j‖_p: each end collects from its row or column."""
    gaps = node._saved_x1.unsqueeze(-2) - node._saved_x2.unsqueeze(-3)
    r, s, g = (None if t is None else t.unsqueeze(-1) for t in (node._saved_result, s, g))
    assert r is not None
    each = _norm(gaps, r, float(getattr(node, "_saved_p", 2)), (-1,), gaps.shape, s, g)
    return (None, None) if each is None else (each.sum(-2), each.sum(-3))


def own_distances(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """r_ij = ‖x_i − x_j‖_p for i < j."""
    x = node._saved_self
    left, right = torch.triu_indices(len(x), len(x), offset=1, device=x.device)
    r, s, g = (None if t is None else t.unsqueeze(-1) for t in (node._saved_result, s, g))
    assert r is not None
    each = _norm(x[left] - x[right], r, float(node._saved_p), (-1,), torch.Size([len(left), x.shape[1]]), s, g)
    return None if each is None else torch.zeros_like(x).index_add(0, left, each).index_add(0, right, each)


def _order(node: Any) -> float:
    order = node._saved_ord if hasattr(node, "_saved_ord") else node._saved_p
    return 2.0 if order is None else float(order)


def _norm(
    x: Tensor, r: Tensor, p: float, dims: Sequence[int], shape: torch.Size, s: Tensor | None, g: Tensor | None
) -> Tensor | None:
    """With u = |x|/r:  f' = ±u^(p−1),  f'' = (p − 1)(u^(p−2) − f'²)/r = (p − 1) u^(p−2) (1 − u^p)/r.

    Sums over ``shape``: an input that was broadcast before the norm moves several x at once.
    """
    if p == 0:
        return torch.zeros_like(x).sum_to_size(shape)
    if math.isinf(p):
        return _extreme(x, r, dims, shape, s)
    u = (x.abs() / r).masked_fill(r == 0, 0.0)  # the norm is flat at zero, as torch has it
    first = (x.sign() * u.pow(p - 1)).masked_fill(u == 0, 0.0).sum_to_size(shape)
    transport = None if s is None else first.square() * s
    if g is None or p == 1:
        return transport
    if shape == x.shape:  # u^p sums to one
        bend = u.pow(p - 2) * complement(u.pow(p), [*dims])
    else:
        bend = u.pow(p - 2).masked_fill(r == 0, 0.0).sum_to_size(shape) - first.square()
    return added(transport, (bend * ((p - 1) / r)).masked_fill(r == 0, 0.0) * g)


def _extreme(x: Tensor, r: Tensor, dims: Sequence[int], shape: torch.Size, s: Tensor | None) -> Tensor | None:
    """The largest |x|, shared evenly among equals."""
    largest = (x.abs() == r).to(x.dtype)
    share = x.sign() * largest / (largest.sum(list(dims), keepdim=True) if dims else largest)
    return None if s is None else share.sum_to_size(shape).square() * s


def logsumexp(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """q = softmax(x) over the dimensions:  q² s + (q − q²) g."""
    x = node._saved_self
    dims = reduced_dims(node, x)
    q = (x - kept(node._saved_result, x, dims)).exp()
    transport = None if s is None else q.square() * kept(s, x, dims)
    return added(transport, None if g is None else spread(q, dims).mul_(kept(g, x, dims)))


def log_cumsum_exp(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """y_k = log Σ_{j≤k} e^(x_j), p_ki = e^(x_i − y_k):  Σ_{k≥i} p² s + (p − p²) g."""
    x, y, dim = node._saved_self, node._saved_result, signed(node._saved_dim)
    if x.dim() == 0:
        return s
    bend = None if g is None else _from_here_on(g, x, y, dim, 1) - _from_here_on(g, x, y, dim, 2)
    return added(None if s is None else _from_here_on(s, x, y, dim, 2), bend)


def _from_here_on(t: Tensor, x: Tensor, y: Tensor, dim: int, power: int) -> Tensor:
    """Σ_{k≥i} e^(power (x_i − y_k)) t_k, in logarithms, so that no exponential overflows."""

    def positive(part: Tensor) -> Tensor:
        logs = (part.log() - power * y).flip(dim).logcumsumexp(dim).flip(dim)
        return (power * x + logs).exp()

    return positive(t.clamp_min(0)) - positive((-t).clamp_min(0))


def product(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor | None, Tensor | None], Tensor | None]:
    """The rule of a product of inputs, linear in each: squared inputs give squared derivatives, so it is the backward
    of the same product of squares."""

    def curvature(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
        if s is None:
            return None
        transport: Tensor
        with torch.enable_grad():
            squares = node._saved_self.detach().square().requires_grad_()
            (transport,) = torch.autograd.grad(forward(node, squares), squares, s)
        return transport

    return curvature


def nansum(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Σ x without those that are nan."""
    x = node._saved_self
    return None if s is None else kept(s, x, reduced_dims(node, x)).expand_as(x).masked_fill(x.isnan(), 0.0)


def cumsum(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """y_k = Σ_{i≤k} x_i:  Σ_{k≥i} s_k."""
    dim = signed(node._saved_dim)
    return s if s is None or not s.dim() else s.flip(dim).cumsum(dim).flip(dim)


def extreme_of_all(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    """The largest, smallest or middle one of all elements, shared evenly among equals."""
    x, result = node._saved_self, node._saved_result
    chosen = torch.where(result.isnan(), x.isnan(), x == result)
    return None if s is None else chosen * (s / chosen.sum().square())


def _product_over_dim(node: Any, x: Tensor) -> Tensor:
    return x.prod(signed(node._saved_dim), keepdim=node._saved_keepdim)


register(Coupled(nansum, linear=True), "NansumBackward0")
register(Coupled(cumsum, linear=True), "CumsumBackward0")
register(Coupled(extreme_of_all), "MaxBackward1", "MedianBackward0", "MinBackward1", "NanmedianBackward0")
register(Coupled(variance), "VarBackward0")
register(Coupled(deviation), "StdBackward0")
register(Coupled(with_mean(variance), outputs=2), "VarMeanBackward0")
register(
    Coupled(with_mean(lambda node, s, g: deviation(node, s, g, node._saved_result0)), outputs=2), "StdMeanBackward0"
)
register(Coupled(norm), "LinalgVectorNormBackward0", "NormBackward0", "NormBackward1")
register(Coupled(distance), "DistBackward0")
register(Coupled(all_distances), "CdistBackward0", "EuclideanDistBackward0")
register(Coupled(own_distances), "PdistBackward0")
register(Coupled(logsumexp), "LogsumexpBackward0")
register(Coupled(log_cumsum_exp), "LogcumsumexpBackward0")
register(Coupled(product(lambda node, x: x.prod())), "ProdBackward0")
register(Coupled(product(_product_over_dim)), "ProdBackward1")
register(Coupled(product(lambda node, x: x.cumprod(signed(node._saved_dim)))), "CumprodBackward0")
