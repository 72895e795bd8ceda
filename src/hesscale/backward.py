"""Start here: the one walk that computes curvature beside PyTorch's own backward pass.

A hook before every node of the autograd graph gets the gradient g from torch, takes the curvature s that the node's
consumers left for it, asks the node's rule for the curvature of each input, and leaves that for the nodes behind.
The three methods are three ways to do so:

- ``hesscale``     transport + residual everywhere (Elsayed & Mahmood, eqs. 5 and 6)
- ``hesscale_gn``  the residual only in the loss: before ``output``, or as long as the way from the loss was linear
- ``bl89``         as hesscale, with softmax and log-softmax taken for element-wise functions (Becker & LeCun 1989)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from . import graph as graphs
from .graph import Edge
from .plan import Method, Plan, make_plan, method_named
from .regions import region_curvatures
from .rules.calculus import in_single_precision, widened
from .rules.fallback import fallback_named
from .rules.families import Curvatures, Rebuilt

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
    _arm(loss, curvature, method, output, missing=missing, generator=generator)
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
_TWO_LOSSES = "two attached losses meet in one backward pass: add the losses first, then attach their sum, once"


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
) -> Walk:
    way = method_named(method)
    fallback = fallback_named(missing, generator)
    _check_seed("curvature", curvature, y)
    outputs = _as_tuple(output)
    if not all(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in outputs):
        raise ValueError("output must be a tensor (or several) of the loss's graph")
    seeded = curvature is not None
    plan = make_plan(y, way, outputs=outputs, seeded=seeded, targets=targets, fallback=fallback)
    return Walk(plan, curvature)


_RUNNING: Final[weakref.WeakValueDictionary[int, Walk]] = weakref.WeakValueDictionary()


@final
class Walk:
    """One armed pass.

    The root's hook holds it; all other hooks hold it weakly and by a node's place in the plan, so that an armed graph
    nobody runs can still be collected.
    """

    def __init__(self, plan: Plan, seed: Tensor | None) -> None:
        self._plan = plan
        self._seed = seed
        self._pending: dict[Edge, Tensor] = {}
        self._leaves: list[tuple[Tensor, Tensor | None]] = []  # variables that torch gave a gradient, their curvature
        self._before: list[tuple[Tensor, Tensor | None, Tensor | None]] = []  # variable, its .grad, a copy of that
        self._handles: list[Any] = []
        self._nested = False
        weakref.finalize(self, _remove_all, self._handles)  # a backward that fails elsewhere does not tell us
        if plan.visits:
            self._arming = graphs.on_arrival(plan.visits[0], self._start)
        elif seed is not None:  # the start itself is all that is asked for
            self._pending[plan.graph.root] = seed

    def disarm(self) -> None:
        """Removes every hook."""
        if self._plan.visits:
            self._arming.remove()
        self._unhook()

    def abort(self) -> None:
        """Undoes what the pass has done so far: hooks and gradients (curvature is written at the end only)."""
        self.disarm()
        for variable, grad, copy in self._before:
            if grad is not None and copy is not None:
                with torch.no_grad():
                    grad.copy_(copy)
            variable.grad = grad
        self._forget()

    @torch.no_grad()
    def results(self, targets: Sequence[Edge], like: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The curvature at each target, zeros where none arrived, None where ``like`` is None."""
        taken: set[int] = self._storages_of_others()
        found = [self._pending.get(edge) for edge in targets]
        self._forget()
        return tuple(None if x is None else _owned(s, x, taken) for s, x in zip(found, like, strict=True))

    def _start(self, grads: Sequence[Tensor | None]) -> None:
        if self._nested:
            return
        self._unhook()
        self._forget()
        other = _RUNNING.get(graphs.running_backward())
        if other is not None:
            other.abort()
            self.disarm()
            raise RuntimeError(_TWO_LOSSES)
        _RUNNING[graphs.running_backward()] = self
        graphs.when_backward_ends(self._finish)
        if graphs.running_backward_frees():
            self._handles.append(self._arming)
        if self._seed is not None:
            self._give(self._plan.graph.root, self._seed)
        walk = weakref.ref(self)
        for place, node in enumerate(self._plan.visits[1:], start=1):
            self._handles.append(graphs.on_arrival(node, _hook(walk, place)))
        self.visit(0, grads)

    def visit(self, place: int, grads: Sequence[Tensor | None]) -> None:
        """What happens at one node, once torch has its gradient."""
        if self._nested:
            return
        try:
            with torch.no_grad(), _autocast_off():
                self._visit(self._plan.visits[place], grads)
        except BaseException:
            self.abort()
            raise

    def _visit(self, node: Node, grads: Sequence[Tensor | None]) -> None:
        plan = self._plan
        s = [self._take((node, nr)) for nr in range(len(grads))]
        if node not in plan.rules:
            self._arrive(graphs.leaf_of(node), s[0])
            return
        g = [widened(grad) for grad in grads] if node in plan.loss else [None] * len(grads)
        self._nested = True  # second derivatives may run nodes that carry our hooks
        try:
            given = self._curvatures(node, s, g)
        finally:
            self._nested = False
        for edge, curvature in given:
            if edge is not None and curvature is not None:
                self._give(edge, widened(curvature))

    def _curvatures(self, node: Node, s: Curvatures, g: Curvatures) -> list[tuple[Edge | None, Tensor | None]]:
        plan = self._plan
        if node in plan.regions:
            return region_curvatures(plan.regions[node], s[0], g[0], plan.targets)
        rule, seen = plan.rules[node], in_single_precision(node)
        if isinstance(rule, Rebuilt):
            curvatures = _walk_rebuilt(rule, seen, s, g, plan)
        else:
            curvatures = rule(seen, s, g, plan.graph.wanted[node])
        return list(zip(plan.graph.edges[node], curvatures, strict=True))

    def _give(self, edge: Edge, curvature: Tensor) -> None:
        """Fan-out: what several consumers say of one tensor is added; their cross terms are what HesScale drops."""
        pending = self._pending.get(edge)
        self._pending[edge] = curvature if pending is None else pending + curvature

    def _take(self, edge: Edge) -> Tensor | None:
        return self._pending.get(edge) if edge in self._plan.targets else self._pending.pop(edge, None)

    def _arrive(self, variable: Tensor, s: Tensor | None) -> None:
        grad = variable.grad
        self._before.append((variable, grad, None if grad is None else grad.clone()))
        self._leaves.append((variable, s))

    @torch.no_grad()
    def _finish(self) -> None:
        """Writes ``p.curvature`` wherever torch has written ``p.grad``."""
        taken = self._storages_of_others()
        for (variable, s), (_, grad, _) in zip(self._leaves, self._before, strict=True):
            old = getattr(variable, "curvature", None)
            if grad is None or old is None:
                variable.curvature = _owned(s, variable, taken)  # type: ignore[attr-defined]
            elif s is not None:
                variable.curvature = old.add_(s)  # type: ignore[attr-defined]
        self._unhook()
        if not self._plan.targets:
            self._forget()

    def _storages_of_others(self) -> set[int]:
        return set() if self._seed is None else {self._seed.untyped_storage().data_ptr()}

    def _unhook(self) -> None:
        _remove_all(self._handles)

    def _forget(self) -> None:
        self._pending.clear()
        self._leaves.clear()
        self._before.clear()


def _walk_rebuilt(rule: Rebuilt, node: Any, s: Curvatures, g: Curvatures, plan: Plan) -> Curvatures:
    """The curvature of a fused node's inputs: a walk of its own over the steps the node is made of."""
    with torch.enable_grad():
        outputs, inputs = rule.rebuild(node)
        y = torch.cat([output.reshape(-1) for output in outputs])
    leaves = [leaf for leaf in inputs if leaf is not None and leaf.requires_grad]
    curvature, gradient = (_joined(seeds, outputs) for seeds in (s, g))
    targets = [graphs.edge_of(leaf) for leaf in leaves]
    # without g there is no residual anywhere, which is how Gauss-Newton walks behind the loss
    method = Method(plan.method.rules, gauss_newton=gradient is None)
    inner = make_plan(y, method, seeded=True, targets=targets)
    walk = Walk(inner, curvature)
    seeds = torch.zeros_like(y) if gradient is None else gradient
    torch.autograd.grad(y, leaves, seeds, allow_unused=True)
    walk.disarm()
    found = dict(zip(map(id, leaves), walk.results(targets, leaves), strict=True))
    return [None if leaf is None else found.get(id(leaf)) for leaf in inputs]


def _joined(seeds: Curvatures, outputs: Sequence[Tensor]) -> Tensor | None:
    if all(seed is None for seed in seeds):
        return None
    pairs = zip(seeds, outputs, strict=True)
    return torch.cat([(torch.zeros_like(out) if seed is None else seed).reshape(-1) for seed, out in pairs])


def _autocast_off() -> contextlib.AbstractContextManager[Any]:
    """Rules compute in the precision of what they are given, also if backward is called under autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.autocast(kinds[0], enabled=False) if kinds else contextlib.nullcontext()


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _hook(walk: weakref.ref[Walk], place: int) -> Callable[[Sequence[Tensor | None]], None]:
    def arrive(grads: Sequence[Tensor | None]) -> None:
        running = walk()
        if running is not None:
            running.visit(place, grads)

    return arrive


def _owned(s: Tensor | None, like: Tensor, taken: set[int]) -> Tensor:
    """``s`` laid out like ``like`` in memory of its own, which is added to ``taken``; zeros if there is no ``s``."""
    if s is None or s._is_zerotensor():  # torch's zeros without memory
        return torch.zeros_like(like, requires_grad=False)
    storage = s.untyped_storage()
    whole = storage.nbytes() == s.numel() * s.element_size()
    if whole and s.stride() == like.stride() and storage.data_ptr() not in taken:
        taken.add(storage.data_ptr())
        return s.detach()
    return torch.empty_like(like, dtype=s.dtype, requires_grad=False).copy_(s)
