"""Start here: the one walk that computes curvature beside PyTorch's own backward pass.

A hook before every node of the autograd graph gets the gradient g from torch, takes the curvature s that the node's
consumers left for it, asks the node's rule for the curvature of each input, and leaves that for the nodes behind.
The three methods are three ways to do so:

- ``hesscale``     transport + residual everywhere (Elsayed & Mahmood, eqs. 5 and 6)
- ``hesscale_gn``  the residual only in the loss: before ``output``, or as long as the way from the loss was linear
- ``bl89``         as hesscale, with softmax and log-softmax taken for element-wise functions (Becker & LeCun 1989)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from . import graph as graphs
from .graph import Edge
from .plan import make_plan, method_named
from .rules.fallback import fallback_named
from .walk import Walk

Tensors = Tensor | Sequence[Tensor]
Missing = Literal["raise", "exact", "sample"]


def backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    curvature: Tensor | None = None,
    *,
    method: str = "hesscale",
    output: Tensors | None = None,
    retain_graph: bool = False,
    missing: Missing = "raise",
    generator: torch.Generator | None = None,
) -> None:
    """Fills ``p.grad`` exactly as ``loss.backward()`` does, and ``p.curvature`` with the diagonal of the Hessian.

    Curvature accumulates as gradients do, and starts afresh where ``p.grad`` is None. ``gradient`` and ``curvature``
    seed the first and second derivative of whatever follows ``loss``; the former is needed if it is not a scalar.
    ``output`` (for ``hesscale_gn`` only) is the network's output, where the loss begins; without it the loss reaches
    back to the first non-linear operation. ``missing`` says what becomes of operations without a rule: "raise" an
    error, "exact" (their own curvature by autograd, element by element: for small ones) or "sample" (one unbiased
    random probe, drawn from ``generator``).
    """
    _check_start(loss, gradient)
    walk = _arm(loss, curvature, method, output, missing=missing, generator=generator)
    try:
        loss.backward(gradient, retain_graph=retain_graph)
    except BaseException:
        walk.abort()
        raise
    finally:
        walk.disarm()


def attach(
    loss: Tensor,
    *,
    curvature: Tensor | None = None,
    method: str = "hesscale",
    output: Tensors | None = None,
    missing: Missing = "raise",
    generator: torch.Generator | None = None,
) -> Tensor:
    """The same ``loss``, armed: a ``.backward()`` on it, or on anything linear in it, fills ``p.curvature`` too.

    For trainers that call backward themselves, on the loss scaled or divided: ``return hesscale.attach(loss)``.
    Arguments as in ``backward``. Several losses: attach their sum. A loss that is added afterwards must share nothing
    with this one but parameters: its gradient would be counted, its curvature would not.
    """
    _arm(loss, curvature, method, output, missing=missing, generator=generator, starts_later=True)
    return loss


def diagonal(
    y: Tensor,
    inputs: Tensors,
    gradient: Tensor | None = None,
    curvature: Tensor | None = None,
    *,
    method: str = "hesscale",
    output: Tensors | None = None,
    retain_graph: bool = False,
    missing: Missing = "raise",
    generator: torch.Generator | None = None,
) -> tuple[Tensor | None, ...]:
    """The curvature of ``y`` at each of ``inputs``, leaves or not, as ``torch.autograd.grad`` gives gradients.

    None comes back for inputs that ``y`` does not depend on. No ``.grad`` and no ``.curvature`` is touched. Other
    arguments as in ``backward``.
    """
    inputs = _as_tuple(inputs)
    if not inputs or not all(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in inputs):
        raise ValueError(
            "pass at least one input, and every input must be a tensor that requires grad when the forward pass runs"
        )
    _check_start(y, gradient)
    targets = [graphs.edge_of(tensor) for tensor in inputs]
    walk = _arm(y, curvature, method, output, targets, missing=missing, generator=generator)
    try:
        grads = torch.autograd.grad(y, inputs, gradient, retain_graph=retain_graph, allow_unused=True)
    finally:
        walk.disarm()
    return walk.results(targets, [None if grad is None else x for grad, x in zip(grads, inputs, strict=True)])


_NOT_A_SCALAR = "a tensor of shape {shape} is no scalar loss: reduce it, or seed it with gradient= (and curvature=)"
_NO_GRAPH = "there is no graph to walk: the loss does not require grad (was it computed under no_grad, or detached?)"


def _as_tuple(tensors: Tensors | None) -> tuple[Tensor, ...]:
    if tensors is None:
        return ()
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _check_start(y: Tensor, gradient: Tensor | None) -> None:
    _check_seed("gradient", gradient, y)
    if gradient is None and y.numel() != 1:
        raise RuntimeError(_NOT_A_SCALAR.format(shape=tuple(y.shape)))


def _check_seed(name: str, seed: Tensor | None, y: Tensor) -> None:
    if not isinstance(y, Tensor):
        raise TypeError(f"expected a tensor to start from, got {type(y).__name__}")
    if not y.requires_grad:
        raise RuntimeError(_NO_GRAPH)
    if seed is None:
        return
    if not isinstance(seed, Tensor) or seed.is_complex():
        raise TypeError(f"{name} must be a real tensor of shape {tuple(y.shape)}, not {seed!r}")
    if seed.shape != y.shape:
        raise ValueError(f"{name} has shape {tuple(seed.shape)}, but what it seeds has shape {tuple(y.shape)}")


def _arm(
    y: Tensor,
    curvature: Tensor | None,
    method: str,
    output: Tensors | None,
    targets: Sequence[Edge] | None = None,
    *,
    missing: Missing,
    generator: torch.Generator | None,
    starts_later: bool = False,
) -> Walk:
    way = method_named(method)
    fallback = fallback_named(missing, generator)
    _check_seed("curvature", curvature, y)
    outputs = _as_tuple(output)
    if not all(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in outputs):
        raise ValueError("output must be a tensor (or several) of the loss's graph")
    seeded = curvature is not None
    plan, graph = make_plan(y, way, outputs=outputs, seeded=seeded, targets=targets, fallback=fallback)
    return Walk(plan, graph, curvature, starts_later=starts_later)
