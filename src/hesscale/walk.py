"""One armed pass: hooks that carry curvature from node to node while torch runs its own backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from . import graph as graphs
from .graph import Edge
from .plan import Method, Plan, make_plan
from .regions import region_curvatures
from .rules.calculus import LOW_PRECISION, in_single_precision, widened
from .rules.families import Curvatures, Rebuilt

_TWO_LOSSES = "two attached losses meet in one backward pass: add the losses first, then attach their sum, once"
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
                self._give(edge, self._cast(edge, curvature))

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

    def _cast(self, edge: Edge, curvature: Tensor) -> Tensor:
        """In the dtype of the tensor it belongs to, as torch has gradients; half precision is kept in single."""
        dtype = self._plan.graph.dtypes[edge[0]][edge[1]]
        dtype = torch.float32 if dtype in LOW_PRECISION else dtype
        return curvature if curvature.dtype is dtype else curvature.to(dtype)

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
                variable.curvature = old.to(s).add_(s)  # type: ignore[attr-defined]  # the model may have moved
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
