"""One armed pass: hooks that carry curvature from node to node while torch runs its own backward.

``visit`` is the algorithm: take what waits at a node's outputs, ask its rule, leave the answer at its inputs. Leaves
keep what has arrived until torch is done, and are written then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from . import graph as graphs
from . import leaves
from .fast.workspace import Workspace, lend_from, workspace_of
from .graph import Graph, Link
from .plan import Method, Plan, Stop, make_plan
from .regions import region_curvatures
from .rules.calculus import View, widened
from .rules.families import Curvatures, Rebuilt

_TWO_LOSSES = "two attached losses meet in one backward pass: add the losses first, then attach their sum, once"
_RUNNING: Final[weakref.WeakValueDictionary[int, Walk]] = weakref.WeakValueDictionary()


class Arrival(NamedTuple):
    """What has come to a leaf, and what to restore there if the pass fails."""

    leaf: Tensor
    s: Tensor | Link | None  # or where it is going to wait
    continues: bool  # its curvature so far belongs to its gradient so far
    grad: Tensor | None  # before the pass
    copy: Tensor | None  # of that, since torch adds to it in place


@final
class Walk:
    """One armed pass over a graph.

    Only the root's hook holds it, and it holds nodes only while a pass is running, so that an armed graph which nobody
    runs is freed with its loss. All other hooks hold it weakly.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        seed: Tensor | None,
        *,
        starts_later: bool = False,
        writes_to: Sequence[Tensor] = (),  # targets that get a gradient and curvature, rather than ``results``
    ) -> None:
        graphs.prepare_saved(graph.nodes)
        self._plan = plan
        self._starts_later = starts_later
        self._graph = None if starts_later else graph
        self._writes_to = writes_to
        self._seed = None if seed is None else widened(seed.detach())
        self._pending: dict[Link, Tensor] = {}
        self._arrivals: list[Arrival] = []
        self._handles: list[Any] = []
        self._workspace: Workspace | None = None
        self._scope: Callable[[], AbstractContextManager[None]] = nullcontext
        weakref.finalize(self, _remove_all, self._handles)  # a backward that fails elsewhere does not tell us
        self._arming = graphs.on_arrival(graph.nodes[0], self._start) if plan.stops else None
        if not plan.stops and self._seed is not None:  # the start itself is all that is asked for
            self._pending[plan.start] = self._seed

    def visit(self, stop: Stop, grads: Sequence[Tensor | None]) -> None:
        """Moves curvature over one node, for which torch has just computed the gradient g of its outputs."""
        before = lend_from(self._workspace)
        try:
            with self._scope():
                s = [self._taken(link) for link in stop.outputs]
                g = [widened(grad.detach()) if stop.is_loss and grad is not None else None for grad in grads]
                self._move(stop, s, g)
        except BaseException:
            self.abort()
            raise
        finally:
            lend_from(before)

    def _move(self, stop: Stop, s: Curvatures, g: Curvatures) -> None:
        graph, plan = self._graph, self._plan
        assert graph is not None
        node = graph.nodes[stop.place]
        if stop.rule is None:
            self._arrive(graphs.leaf_of(node), s[0])
        elif stop.region is not None:
            for link, curvature in region_curvatures(stop.region, graph, s[0], g[0], plan.targets):
                self._give(link, curvature)
        else:
            view = View(node)
            if isinstance(stop.rule, Rebuilt):
                curvatures = _walk_rebuilt(stop.rule, view, s, g, plan.method)
            else:
                curvatures = stop.rule(view, s, g, stop.wanted)
            for input, curvature in zip(stop.inputs, curvatures, strict=True):
                if input is not None:
                    self._give(input, curvature)

    def _taken(self, link: Link) -> Tensor | None:
        return self._pending.get(link) if link in self._plan.targets else self._pending.pop(link, None)

    def _give(self, link: Link, curvature: Tensor | None) -> None:
        """Fan-out: what several consumers say of one tensor is added; their cross terms are what HesScale drops."""
        if curvature is None:
            return
        dtype = self._plan.dtypes[link]
        curvature = curvature if curvature.dtype is dtype else curvature.to(dtype)
        before = self._pending.get(link)
        self._pending[link] = curvature if before is None else before + curvature

    def _arrive(self, leaf: Tensor, s: Tensor | Link | None) -> None:
        grad = leaf.grad
        copy = None if grad is None else grad.detach().clone()
        self._arrivals.append(Arrival(leaf, s, leaves.continues(leaf), grad, copy))

    def _start(self, grads: Sequence[Tensor | None]) -> None:
        """The first visit, at the root: hooks the nodes behind it."""
        if graphs.is_nested():
            return
        self._forget()
        plan = self._plan
        if self._starts_later:  # by whatever backward the user calls
            self._graph = graphs.trace(graphs.running_node())
            if not self._writes_anything():
                return
            graphs.prepare_saved(self._graph.nodes)
        assert self._graph is not None
        self._scope = nullcontext if graphs.is_plain_mode() else graphs.plain_mode
        self._refuse_second()
        leaves.clear_orphans()
        graphs.when_backward_ends(self._finish)
        if plan.owner is not None:
            self._workspace = workspace_of(graphs.leaf_of(self._graph.nodes[plan.owner]))
        if self._workspace is not None:
            self._workspace.begin_pass()
        if self._seed is not None:
            self._pending[plan.start] = self._seed
        for tensor in self._writes_to:
            self._arrive(tensor, self._link(tensor))
        walk = weakref.ref(self)
        for stop in plan.stops[1:]:
            self._handles.append(graphs.on_arrival(self._graph.nodes[stop.place], _hook(walk, stop)))
        self.visit(plan.stops[0], grads)

    def _writes_anything(self) -> bool:
        """Whether the running backward is going to accumulate gradients: torch.autograd.grad does not."""
        assert self._graph is not None
        leaf_nodes = (self._graph.nodes[stop.place] for stop in self._plan.stops if stop.rule is None)
        return any(map(graphs.running_backward_accumulates, leaf_nodes))

    def _refuse_second(self) -> None:
        """Two walks in one backward would each see all of the gradient, but only their own curvature."""
        task = graphs.running_backward()
        other = _RUNNING.get(task)
        if other is not None and other is not self:
            other.abort()
            self.abort()
            raise RuntimeError(_TWO_LOSSES)
        _RUNNING[task] = self

    def _finish(self) -> None:
        """Writes ``p.curvature`` wherever torch has written ``p.grad``."""
        taken = self._foreign_storages()
        for arrival in self._arrivals:
            s = self._pending.get(arrival.s) if isinstance(arrival.s, tuple) else arrival.s
            leaves.add(arrival.leaf, leaves.owned(s, arrival.leaf, taken), to_old=arrival.continues)
        _remove_all(self._handles)
        if not self._plan.targets:
            self._forget()

    def results(self, targets: Sequence[Tensor], are_reached: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The curvature at each target, zeros where none arrived, None where the target was not reached."""
        taken = self._foreign_storages()
        found = [self._pending.get(self._link(tensor)) for tensor in targets]
        self._forget()
        return tuple(
            leaves.owned(s, tensor, taken) if is_reached else None
            for s, tensor, is_reached in zip(found, targets, are_reached, strict=True)
        )

    def _link(self, tensor: Tensor) -> Link:
        assert self._graph is not None
        node, nr = graphs.edge_of(tensor)
        return self._graph.places.get(node, -1), nr

    def _foreign_storages(self) -> set[int]:
        return set() if self._seed is None else {leaves.storage_of(self._seed)}

    def disarm(self) -> None:
        """Removes every hook."""
        if self._arming is not None:
            self._arming.remove()
        _remove_all(self._handles)

    def abort(self) -> None:
        """Undoes what the pass has done so far: hooks and gradients (curvature is written at the end only)."""
        for arrival in self._arrivals:
            if arrival.grad is not None and arrival.copy is not None:
                with torch.no_grad():
                    arrival.grad.copy_(arrival.copy)
            arrival.leaf.grad = arrival.grad
        self.disarm()
        self._forget()

    def _forget(self) -> None:
        _remove_all(self._handles)
        self._pending.clear()
        self._arrivals.clear()
        if self._starts_later:
            self._graph = None


def _hook(walk: weakref.ref[Walk], stop: Stop) -> Callable[[Sequence[Tensor | None]], None]:
    def arrive(grads: Sequence[Tensor | None]) -> None:
        running = walk()
        if running is not None and not graphs.is_nested():
            running.visit(stop, grads)

    return arrive


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _walk_rebuilt(rule: Rebuilt, node: View, s: Curvatures, g: Curvatures, method: Method) -> Curvatures:
    """The curvature of a fused node's inputs: a walk of its own over the steps the node is made of."""
    with torch.enable_grad():
        outputs, inputs = rule.rebuild(node)
        y = torch.cat([output.reshape(-1) for output in outputs])
    sources = [leaf for leaf in inputs if leaf is not None and leaf.requires_grad]
    curvature, gradient = (_joined(seeds, outputs) for seeds in (s, g))
    targets = [graphs.edge_of(leaf) for leaf in sources]
    # without g there is no residual anywhere, which is how Gauss-Newton walks behind the loss
    plan, graph = make_plan(y, Method(method.rules, gauss_newton=gradient is None), seeded=True, targets=targets)
    walk = Walk(plan, graph, curvature)
    torch.autograd.grad(y, sources, torch.zeros_like(y) if gradient is None else gradient, allow_unused=True)
    walk.disarm()
    found = dict(zip(map(id, sources), walk.results(sources, [True] * len(sources)), strict=True))
    return [None if leaf is None else found.get(id(leaf)) for leaf in inputs]


def _joined(seeds: Curvatures, outputs: Sequence[Tensor]) -> Tensor | None:
    """The seeds of several outputs in one vector; None if there are none."""
    if all(seed is None for seed in seeds):
        return None
    pairs = zip(seeds, outputs, strict=True)
    return torch.cat([(torch.zeros_like(out) if seed is None else seed).reshape(-1) for seed, out in pairs])
