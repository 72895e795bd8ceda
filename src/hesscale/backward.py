"""Start here: what users call. Each function plans a pass over the graph of a loss, arms it, and lets torch run it.

While torch does, hooks at the nodes carry curvature along (walk.py): where to and by which rules was decided before
(plan.py). The three methods are three ways to do so:

- ``hesscale``     transport + residual everywhere (Elsayed & Mahmood, eqs. 5 and 6)
- ``hesscale_gn``  the residual only in the loss: before ``output``, or as long as the way from the loss was linear
- ``bl89``         as hesscale, with softmax and log-softmax taken for element-wise functions (Becker & LeCun 1989)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .columns.dial import Rank, checked_rank, make_dial
from .graph import edge_of, is_transformed, torch_backward
from .plan import make_plan, method_named
from .rules.fallback import fallback_named
from .walk import INFERENCE, Walk

Tensors = Tensor | Sequence[Tensor]
Outputs = Tensor | GradientEdge | Sequence[Tensor | GradientEdge]
Missing = Literal["raise", "exact", "sample"]


def backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    curvature: Tensor | None = None,
    *,
    method: str = "hesscale",
    output: Outputs | None = None,
    inputs: Tensors | None = None,
    retain_graph: bool = False,
    missing: Missing = "raise",
    rank: Rank = 0,
    generator: torch.Generator | None = None,
) -> None:
    """Fills ``p.grad`` exactly as ``loss.backward()`` does, and ``p.curvature`` with the diagonal of the Hessian.

    Curvature accumulates as gradients do, and starts afresh when they do. ``gradient`` and ``curvature`` seed the first
    and second derivative of whatever follows ``loss``; the former is needed if it is not a scalar. ``inputs``: only
    these tensors, leaves or not, get a gradient and curvature, as in torch.
    ``output`` (for ``hesscale_gn`` only) is the network's output, where the loss begins; without it the loss reaches
    back to the first non-linear operation. ``missing`` says what becomes of operations without a rule: "raise" an
    error, "exact" (their own curvature by autograd, element by element: for small ones) or "sample" (one unbiased
    random probe, drawn from ``generator``).
    ``rank`` is how many eigenvectors of the loss's own curvature are carried beside the diagonal, squared example by
    example: nearer to the truth with each, for one more product per layer; "full" for all
    (https://hesscale.github.io/hesscale/method.html).

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hesscale.backward((w**3).sum())
    >>> w.grad, w.curvature
    (tensor([ 3., 12.]), tensor([ 6., 12.]))
    """
    _check_start(loss, gradient, curvature)
    _check_scalar(loss, gradient)
    chosen = None if inputs is None else _checked_inputs(inputs)
    walk = _arm(loss, curvature, method, output, chosen, missing=missing, rank=rank, generator=generator, writes=True)
    try:
        torch_backward(loss, gradient, retain_graph=retain_graph, inputs=chosen)
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
    output: Outputs | None = None,
    missing: Missing = "raise",
    rank: Rank = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The same ``loss``, armed: a ``.backward()`` on it, or on anything linear in it, fills ``p.curvature`` too.

    For trainers that call backward themselves, on the loss scaled or divided: ``return hesscale.attach(loss)``.
    Arguments as in ``backward``. Several losses: attach their sum. A loss that is added afterwards must share nothing
    with this one but parameters: its gradient would be counted, its curvature would not.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> loss = hesscale.attach((w**3).sum())
    >>> (loss / 2).backward()  # the trainer's line
    >>> w.curvature
    tensor([3., 6.])
    """
    _check_start(loss, None, curvature)
    _arm(loss, curvature, method, output, missing=missing, rank=rank, generator=generator, starts_later=True)
    return loss


@overload
def diagonal(
    y: Tensor,
    inputs: Tensors,
    gradient: Tensor | None = ...,
    curvature: Tensor | None = ...,
    *,
    method: str = ...,
    output: Outputs | None = ...,
    retain_graph: bool = ...,
    missing: Missing = ...,
    rank: Rank = ...,
    generator: torch.Generator | None = ...,
) -> tuple[Tensor | None, ...]: ...


@overload
def diagonal(
    y: Tensor,
    inputs: Mapping[str, Tensor] | nn.Module,
    gradient: Tensor | None = ...,
    curvature: Tensor | None = ...,
    *,
    method: str = ...,
    output: Outputs | None = ...,
    retain_graph: bool = ...,
    missing: Missing = ...,
    rank: Rank = ...,
    generator: torch.Generator | None = ...,
) -> dict[str, Tensor | None]: ...


def diagonal(
    y: Tensor,
    inputs: Tensors | Mapping[str, Tensor] | nn.Module,
    gradient: Tensor | None = None,
    curvature: Tensor | None = None,
    *,
    method: str = "hesscale",
    output: Outputs | None = None,
    retain_graph: bool = False,
    missing: Missing = "raise",
    rank: Rank = 0,
    generator: torch.Generator | None = None,
) -> Any:
    """The curvature of ``y`` at each of ``inputs``, leaves or not, as ``torch.autograd.grad`` gives gradients.

    A tuple; or a dict, if ``inputs`` is one, or a module, whose parameters that require grad are meant. None comes back
    for inputs that ``y`` does not depend on. No ``.grad`` and no ``.curvature`` is touched. Other arguments as in
    ``backward``.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> loss = model(torch.tensor([[1.0, 3.0]])).square().sum()
    >>> hesscale.diagonal(loss, model)
    {'weight': tensor([[ 2., 18.]])}
    """
    if isinstance(inputs, nn.Module):
        inputs = {name: p for name, p in inputs.named_parameters() if p.requires_grad}
    found = derivatives(
        y,
        [*inputs.values()] if isinstance(inputs, Mapping) else inputs,
        gradient,
        curvature,
        method=method,
        output=output,
        retain_graph=retain_graph,
        missing=missing,
        rank=rank,
        generator=generator,
    )[1]
    return dict(zip(inputs, found, strict=True)) if isinstance(inputs, Mapping) else found


def derivatives(
    y: Tensor,
    inputs: Tensors,
    gradient: Tensor | None = None,
    curvature: Tensor | None = None,
    *,
    method: str = "hesscale",
    output: Outputs | None = None,
    retain_graph: bool = False,
    missing: Missing = "raise",
    rank: Rank = 0,
    generator: torch.Generator | None = None,
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """The gradient and the curvature of ``y`` at each of ``inputs``, in one pass; arguments as in ``diagonal``."""
    tensors = _checked_inputs(inputs)
    _check_start(y, gradient, curvature)
    _check_scalar(y, gradient)
    walk = _arm(y, curvature, method, output, tensors, missing=missing, rank=rank, generator=generator)
    try:
        grads = torch.autograd.grad(y, tensors, gradient, retain_graph=retain_graph, allow_unused=True)
    finally:
        walk.disarm()
    return grads, walk.results(tensors, [grad is not None for grad in grads])


def _checked_inputs(inputs: Tensors) -> tuple[Tensor, ...]:
    tensors = _as_tuple(inputs)
    if not tensors or not all(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "pass at least one input, and every input must be a tensor that requires grad when the forward pass runs"
        )
    return tensors


_NOT_A_SCALAR = "a tensor of shape {shape} is no scalar loss: reduce it, or seed it with gradient= (and curvature=)"
_TRANSFORMED = (
    "inside torch.func transforms (grad, vmap, ...) hesscale cannot walk the graph: call it outside, on tensors that "
    "require grad"
)
_GENERATOR = (
    "generator= cannot reach into a compiled region: leave it out, and with it missing='sample', or compute this loss "
    "within `with torch.compiler.set_stance('force_eager'):`"
)
NO_GRAPH = "there is no graph to walk: the loss does not require grad (was it computed under no_grad, or detached?)"


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    if tensors is None:
        return ()
    return (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)


def _check_scalar(y: Tensor, gradient: Tensor | None) -> None:
    if gradient is None and y.numel() != 1:
        raise RuntimeError(_NOT_A_SCALAR.format(shape=tuple(y.shape)))


def _check_start(y: Tensor, gradient: Tensor | None, curvature: Tensor | None) -> None:
    if not isinstance(y, Tensor):
        raise TypeError(f"expected a tensor to start from, got {type(y).__name__}")
    if is_transformed(y):
        raise RuntimeError(_TRANSFORMED)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(INFERENCE)
    if not y.requires_grad:
        raise RuntimeError(NO_GRAPH)
    for name, seed in (("gradient", gradient), ("curvature", curvature)):
        if seed is not None:
            _check_seed(name, seed, y)


def _check_seed(name: str, seed: Tensor, y: Tensor) -> None:
    if not isinstance(seed, Tensor) or seed.is_complex():
        raise TypeError(f"{name} must be a real tensor of shape {tuple(y.shape)}, not {seed!r}")
    if seed.shape != y.shape:
        raise ValueError(f"{name} has shape {tuple(seed.shape)}, but what it seeds has shape {tuple(y.shape)}")


def _arm(
    y: Tensor,
    curvature: Tensor | None,
    method: str,
    output: Outputs | None,
    inputs: Sequence[Tensor] | None = None,
    *,
    missing: Missing,
    rank: Rank,
    generator: torch.Generator | None,
    starts_later: bool = False,
    writes: bool = False,
) -> Walk:
    way = method_named(method)
    fallback = fallback_named(missing, generator)
    outputs = _as_tuple(output)
    if not all(isinstance(y, GradientEdge) or (isinstance(y, Tensor) and y.requires_grad) for y in outputs):
        raise ValueError("output must be a tensor (or several) of the loss's graph")
    seeded = curvature is not None
    targets = None if inputs is None else [edge_of(tensor) for tensor in inputs]
    columns = checked_rank(rank)
    if columns and method == "bl89":
        raise ValueError("rank= goes with 'hesscale' and 'hesscale_gn': for 'bl89' the softmax has no columns")
    plan, graph = make_plan(y, way, outputs=outputs, seeded=seeded, targets=targets, fallback=fallback, rank=rank)
    if plan.is_composite and generator is not None:
        raise ValueError(_GENERATOR)
    has_columns = columns and plan.stops and not plan.is_composite
    dial = make_dial(graph, columns, plan.residuals, plan.aims, generator) if has_columns else None
    unique = tuple({id(tensor): tensor for tensor in inputs or ()}.values()) if writes else ()
    return Walk(plan, graph, curvature, starts_later=starts_later, writes_to=unique, dial=dial)
