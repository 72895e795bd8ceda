"""One armed pass: hooks that carry curvature from node to node while torch runs its own backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from . import graph as graphs
from .graph import Edge, Graph, Link
from .plan import Method, Plan, Stop, make_plan
from .regions import region_curvatures
from .rules.calculus import Widened, widened
from .rules.families import Curvatures, Rebuilt
from .workspace import Workspace, lending, workspace_of

_TWO_LOSSES = "two attached losses meet in one backward pass: add the losses first, then attach their sum, once"
_RUNNING: Final[weakref.WeakValueDictionary[int, Walk]] = weakref.WeakValueDictionary()


@final
class Walk:
    """One armed pass.

    The root's hook holds it; all other hooks hold it weakly and by a node's place in the plan, so that an armed graph
    nobody runs can still be collected.
    """

    def __init__(self, plan: Plan, graph: Graph, seed: Tensor | None, *, starts_later: bool = False) -> None:
        self._plan = plan
        self._graph = graph
        self._seed = seed
        self._starts_later = starts_later
        self._readable = self._prepare_saved()
        self._ahead = frozenset[int]()  # places that are visited before torch comes to them
        self._pending: dict[Link, Tensor] = {}
        self._leaves: list[tuple[Tensor, Tensor | None]] = []  # variables that torch gave a gradient, their curvature
        self._before: list[tuple[Tensor, Tensor | None, Tensor | None]] = []  # variable, its .grad, a copy of that
        self._handles: list[Any] = []
        self._workspace: Workspace | None = None
        self._nested = False
        weakref.finalize(self, _remove_all, self._handles)  # a backward that fails elsewhere does not tell us
        if plan.stops:
            self._arming = graphs.on_arrival(graph.nodes[plan.stops[0].place], self._start)
        elif seed is not None:  # the start itself is all that is asked for
            self._pending[plan.start] = seed

    def disarm(self) -> None:
        """Removes every hook."""
        if self._plan.stops:
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
        places = self._graph.places
        found = [self._pending.get((places.get(node, -1), nr)) for node, nr in targets]
        self._forget()
        return tuple(None if x is None else _owned(s, x, taken) for s, x in zip(found, like, strict=True))

    def _prepare_saved(self) -> bool:
        return graphs.prepare_saved(self._graph.nodes[place] for place in self._plan.places)

    def _start(self, grads: Sequence[Tensor | None]) -> None:
        if self._nested:
            return
        self._unhook()
        self._forget()
        plan, nodes = self._plan, self._graph.nodes
        written = [graphs.running_backward_accumulates(nodes[s.place]) for s in plan.stops[1:] if s.rule is None]
        if written and not any(written):  # torch.autograd.grad on an attached loss: there is nothing to write
            return
        # not where torch leaves parts of the graph alone, or what rules read comes back only when torch gets there
        all_there = self._prepare_saved() if self._starts_later else self._readable
        self._ahead = plan.ahead if all(written) and all_there else frozenset[int]()
        other = _RUNNING.get(graphs.running_backward())
        if other is not None:
            other.abort()
            self.disarm()
            raise RuntimeError(_TWO_LOSSES)
        _RUNNING[graphs.running_backward()] = self
        graphs.when_backward_ends(self._finish)
        if graphs.running_backward_frees():
            self._handles.append(self._arming)
        if plan.owner is not None:
            self._workspace = workspace_of(graphs.leaf_of(nodes[plan.owner]))
        if self._workspace is not None:
            self._workspace.begin_pass()
        if self._seed is not None:
            self._give(plan.start, self._seed)
        walk = weakref.ref(self)
        for stop in plan.stops[1:]:
            if stop.place not in self._ahead:
                self._handles.append(graphs.on_arrival(nodes[stop.place], _hook(walk, stop)))
        self.visit(plan.stops[0], grads)

    def visit(self, stop: Stop, grads: Sequence[Tensor | None]) -> None:
        """What happens at one stop, once torch has its gradient, and at those behind it that need none."""
        if self._nested:
            return
        self._nested = True  # second derivatives may run nodes that carry our hooks
        try:
            with _recording_off(), _autocast_off(), lending(self._workspace):
                self._visit(stop, [widened(grad) for grad in grads] if stop.is_loss else [None] * len(grads))
                waiting = list(stop.followers) if self._ahead else []
                while waiting:
                    stop = waiting.pop()
                    self._visit(stop, [None] * len(stop.outputs))
                    waiting += stop.followers
        except BaseException:
            self.abort()
            raise
        finally:
            self._nested = False

    def _visit(self, stop: Stop, g: Curvatures) -> None:
        """Moves curvature over one node."""
        plan, pending = self._plan, self._pending
        s = [pending.get(link) if link in plan.targets else pending.pop(link, None) for link in stop.outputs]
        if stop.rule is None:
            self._arrive(stop.place, s[0])
            return
        for link, curvature in self._curvatures(stop, s, g):
            if link is not None and curvature is not None:
                dtype = plan.dtypes[link]
                self._give(link, curvature if curvature.dtype is dtype else curvature.to(dtype))

    def _curvatures(self, stop: Stop, s: Curvatures, g: Curvatures) -> Iterable[tuple[Link | None, Tensor | None]]:
        if stop.region is not None:
            return region_curvatures(stop.region, self._graph, s[0], g[0], self._plan.targets)
        node: Any = self._graph.nodes[stop.place]
        seen = Widened(node) if stop.is_half else node
        if isinstance(stop.rule, Rebuilt):
            curvatures = _walk_rebuilt(stop.rule, seen, s, g, self._plan.method)
        else:
            assert stop.rule is not None
            curvatures = stop.rule(seen, s, g, stop.wanted)
        return zip(stop.inputs, curvatures, strict=True)

    def _give(self, link: Link, curvature: Tensor) -> None:
        """Fan-out: what several consumers say of one tensor is added; their cross terms are what HesScale drops."""
        pending = self._pending.get(link)
        self._pending[link] = curvature if pending is None else pending + curvature

    def _arrive(self, place: int, s: Tensor | None) -> None:
        node = self._graph.nodes[place]
        variable = graphs.leaf_of(node)
        if place in self._ahead and variable.grad is not None:  # which some hook may still change
            walk = weakref.ref(self)
            self._handles.append(graphs.on_arrival(node, lambda grads: _note(walk, variable, s)))
        else:
            self.note(variable, s)

    def note(self, variable: Tensor, s: Tensor | None) -> None:
        """Keeps what is to be written to a leaf, and what to restore if the pass fails."""
        grad = variable.grad
        with torch.no_grad():
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


def _walk_rebuilt(rule: Rebuilt, node: Any, s: Curvatures, g: Curvatures, method: Method) -> Curvatures:
    """The curvature of a fused node's inputs: a walk of its own over the steps the node is made of."""
    with torch.enable_grad():
        outputs, inputs = rule.rebuild(node)
        y = torch.cat([output.reshape(-1) for output in outputs])
    leaves = [leaf for leaf in inputs if leaf is not None and leaf.requires_grad]
    curvature, gradient = (_joined(seeds, outputs) for seeds in (s, g))
    targets = [graphs.edge_of(leaf) for leaf in leaves]
    # without g there is no residual anywhere, which is how Gauss-Newton walks behind the loss
    plan, graph = make_plan(y, Method(method.rules, gauss_newton=gradient is None), seeded=True, targets=targets)
    walk = Walk(plan, graph, curvature)
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


_NOTHING: Final = contextlib.nullcontext()


def _recording_off() -> contextlib.AbstractContextManager[Any]:
    """It is off already, unless the backward pass runs with create_graph."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def _autocast_off() -> contextlib.AbstractContextManager[Any]:
    """Rules compute in the precision of what they are given, also if backward is called under autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.autocast(kinds[0], enabled=False) if kinds else _NOTHING


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _hook(walk: weakref.ref[Walk], stop: Stop) -> Callable[[Sequence[Tensor | None]], None]:
    def arrive(grads: Sequence[Tensor | None]) -> None:
        running = walk()
        if running is not None:
            running.visit(stop, grads)

    return arrive


def _note(walk: weakref.ref[Walk], variable: Tensor, s: Tensor | None) -> None:
    running = walk()
    if running is not None:
        running.note(variable, s)


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
