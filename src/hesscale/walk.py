"""One armed pass: hooks that carry curvature from node to node while torch runs its own backward.

``Walk.move`` is the algorithm: take what waits at a node's outputs, ask its rule, leave the answer at its inputs. What
arrives at a leaf is written when torch is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from . import graph as graphs
from . import leaves
from .columns.dial import Dial
from .fast.workspace import Workspace, use_workspace, workspace_of
from .graph import Graph, Link
from .plan import Plan, Stop
from .recomputing import keep_recomputed
from .regions import region_curvatures
from .rules.calculus import View, added, widened
from .rules.families import Curvatures
from .traced import is_traced

_TWO_LOSSES = "two attached losses meet in one backward pass: add the losses first, then attach their sum, once"
INFERENCE = "torch.inference_mode() makes gradients that nothing can keep track of: run the backward pass outside of it"
_RUNNING: Final[weakref.WeakValueDictionary[int, Walk]] = weakref.WeakValueDictionary()


class Arrival(NamedTuple):
    """A tensor that gets a gradient and curvature, and what to restore there if the pass fails."""

    leaf: Tensor
    link: Link  # where its curvature is going to wait
    grad: Tensor | None  # before the pass
    copy: Tensor | None  # of that, since torch adds to it in place
    curvature: Tensor | None  # before the pass


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
        dial: Dial | None = None,  # carries columns beside the diagonal
    ) -> None:
        self._half = graphs.prepare_saved(graph)
        self._plan = plan
        self._starts_later = starts_later
        self._graph = None if starts_later else graph
        self._writes_to = writes_to
        self._dial = dial
        self._seed = None if seed is None else widened(seed.detach())
        self._pending: dict[Link, Tensor] = {}
        self._arrivals: list[Arrival] = []
        self._handles: list[Any] = []
        self._workspace_before: Workspace | None = None
        self.scope: Callable[[], AbstractContextManager[None]] = nullcontext
        self._is_mixed = False  # g may be in half precision, or have a graph of its own
        self._is_recorded = False  # create_graph=True
        self._is_traced = is_traced()
        weakref.finalize(self, _remove_all, self._handles)  # a backward that fails elsewhere does not tell us
        is_passed = bool(plan.stops or plan.leaves)
        self._arming = graph.nodes[0].register_prehook(self._start) if is_passed else None
        if not is_passed and self._seed is not None:  # the start itself is all that is asked for
            self._pending[plan.start] = self._seed

    def move(self, stop: Stop, grads: Sequence[Tensor | None]) -> None:
        """Moves curvature over one node, for which torch has just computed the gradient g of its outputs."""
        graph, pending = self._graph, self._pending
        assert graph is not None
        take: Callable[..., Tensor | None] = pending.get if stop.is_target else pending.pop
        s = [*map(take, stop.outputs, stop.nothing)]
        g: Curvatures = stop.nothing
        if stop.is_loss:  # with create_graph=True g depends on x; f'' is wanted at this g
            g = [None if grad is None else widened(grad.detach()) for grad in grads] if self._is_mixed else grads
        node: Any = graph.nodes[stop.place]
        is_half = stop.place in self._half
        seen = View(node, is_half=is_half) if is_half or self._is_traced else node
        if self._dial is not None and stop.place in self._dial.places and g[0] is not None:
            rest = self._dial.carry(graph, stop.place, g[0])
            moved = stop.rule(seen, s, stop.nothing, stop.wanted) if s[0] is not None else [None] * len(rest)
            found: Iterable[tuple[Link | None, Tensor | None]] = zip(stop.inputs, map(added, moved, rest), strict=True)
        elif stop.region is not None:
            found = region_curvatures(stop.region, graph, s[0], g[0], also=self._plan.targets, half=self._half)
        elif stop.is_composite:
            found = zip(stop.inputs, stop.rule(node, s, grads, stop.wanted), strict=True)
        else:
            found = zip(stop.inputs, stop.rule(seen, s, g, stop.wanted), strict=True)
        for link, curvature in found:
            if link is None or curvature is None:
                continue
            dtype, before = self._plan.dtypes[link], pending.get(link)
            curvature = curvature if curvature.dtype is dtype else curvature.to(dtype)
            # fan-out: what several consumers say of one tensor is added; their cross terms are what HesScale drops
            pending[link] = curvature if before is None else before + curvature

    def _start(self, grads: Sequence[Tensor | None]) -> None:
        """The first visit, at the root: looks at what is going to be written, and hooks the nodes behind it."""
        if graphs.NESTED.depth:
            return
        if torch.is_inference_mode_enabled():
            raise RuntimeError(INFERENCE)
        self._forget()
        plan = self._plan
        if self._starts_later:  # by whatever backward the user calls
            self._graph = graphs.graph_behind(graphs.running_node())
        assert self._graph is not None
        nodes: Sequence[Any] = self._graph.nodes
        reached: Sequence[int] = plan.leaves
        if self._starts_later:
            reached = [place for place in plan.leaves if graphs.running_backward_accumulates(nodes[place])]
            if not reached:  # torch.autograd.grad
                return
            self._half = graphs.prepare_saved(self._graph)
        self._prepare(grads)
        if reached:
            self._workspace_before = use_workspace(workspace_of(nodes[reached[0]].variable))
        for place in reached:
            self._expect(nodes[place].variable, (place, 0))
        for tensor in self._writes_to:
            self._expect(tensor, self._link(tensor))
        walk = weakref.ref(self)
        self._handles += [nodes[stop.place].register_prehook(partial(_visit, walk, stop)) for stop in plan.stops[1:]]
        for stop in plan.stops[:1]:  # none where the loss is itself a leaf
            _visit(walk, stop, grads)

    def _prepare(self, grads: Sequence[Tensor | None]) -> None:
        """Claims the running backward, and finds out how it computes."""
        self._refuse_second()
        keep_recomputed(self)
        graphs.when_backward_ends(self._finish)
        self.scope = nullcontext if graphs.is_plain_mode() else graphs.plain_mode
        self._is_recorded = torch.is_grad_enabled()
        has_graph = any(grad is not None and grad.requires_grad for grad in grads)
        self._is_mixed = has_graph or bool(self._half) or self.scope is not nullcontext
        if self._seed is not None:
            self._pending[self._plan.start] = self._seed

    def _expect(self, leaf: Tensor, link: Link) -> None:
        grad = leaf.grad
        copy = None if grad is None else grad.detach().clone()
        self._arrivals.append(Arrival(leaf, link, grad, copy, getattr(leaf, "curvature", None)))
        leaves.drop_if_cleared(leaf)

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
            leaf, s = arrival.leaf, self._at(arrival.link)
            if s is not None or leaf.grad is not None:
                leaves.add(leaf, leaves.owned(s, leaf, taken), method=self._plan.method.name)
        if self._plan.targets:
            _remove_all(self._handles)
        else:
            self._forget()

    def results(self, targets: Sequence[Tensor], are_reached: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The curvature at each target, zeros where none arrived, None where the target was not reached."""
        taken = self._foreign_storages()
        found = [self._at(self._link(tensor)) for tensor in targets]
        self._forget()
        return tuple(
            leaves.owned(s, tensor, taken) if is_reached else None
            for s, tensor, is_reached in zip(found, targets, are_reached, strict=True)
        )

    def _at(self, link: Link) -> Tensor | None:
        """The curvature that has come to an edge, by the walk and by columns."""
        s = self._pending.get(link)
        return s if self._dial is None else added(s, self._dial.squares.get(link))

    def _link(self, tensor: Tensor) -> Link:
        assert self._graph is not None
        node, nr = graphs.edge_of(tensor)
        return self._graph.places.get(node, -1), nr

    def _foreign_storages(self) -> set[int]:
        return set() if self._seed is None else {graphs.storage_id(self._seed)}

    def disarm(self) -> None:
        """Removes every hook."""
        if self._arming is not None:
            self._arming.remove()
        _remove_all(self._handles)

    def abort(self) -> None:
        """Undoes what the pass has done so far: hooks, gradients, and curvature that was dropped."""
        for arrival in self._arrivals:
            if arrival.grad is not None and arrival.copy is not None:
                with torch.no_grad():
                    arrival.grad.copy_(arrival.copy)
            leaf: Any = arrival.leaf
            leaf.grad = arrival.grad
            if arrival.curvature is not None:
                leaf.curvature = arrival.curvature
        self.disarm()
        self._forget()

    def _forget(self) -> None:
        _remove_all(self._handles)
        self._pending.clear()
        self._arrivals.clear()
        if self._dial is not None:
            self._dial.squares.clear()
        use_workspace(self._workspace_before)
        self._workspace_before = None
        if self._starts_later:
            self._graph = None


def _visit(walk: weakref.ref[Walk], stop: Stop, grads: Sequence[Tensor | None]) -> None:
    """The hook of a node: moves curvature over it, or undoes the whole pass if that fails."""
    running = walk()
    if running is None or graphs.NESTED.depth:
        return
    try:
        with running.scope():
            running.move(stop, grads)
    except BaseException:
        running.abort()
        raise


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
