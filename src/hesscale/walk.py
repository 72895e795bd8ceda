"""One armed pass: hooks that carry curvature from node to node while torch runs its own backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, final

import torch
from torch import Tensor

from . import graph as graphs
from .graph import Edge, Graph, Link
from .outer import Outer, factors_of, written_out
from .plan import Method, Plan, Stop, make_plan
from .regions import Region, region_curvatures
from .rules.calculus import Widened, widened
from .rules.families import Curvatures, Rebuilt
from .workspace import Workspace, lend_from, workspace_of

Leaf = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""A variable that torch gives a gradient, its curvature; its ``.grad`` before the pass, a copy of that."""

_TWO_LOSSES = "two attached losses meet in one backward pass: add the losses first, then attach their sum, once"
_RUNNING: Final[weakref.WeakValueDictionary[int, Walk]] = weakref.WeakValueDictionary()


@final
class Walk:
    """One armed pass.

    The root's hook holds it; all other hooks hold it weakly and by a node's place in the plan, so that an armed graph
    nobody runs can still be collected.
    """

    def __init__(
        self, plan: Plan, graph: Graph, seed: Tensor | None, *, starts_later: bool = False, factored: bool = False
    ) -> None:
        self._plan = plan
        self._graph = graph
        self._seed = seed
        self._starts_later = starts_later
        self._factored = factored
        self._readable = self._prepare_saved()
        self._ahead = frozenset[int]()  # places that are visited before torch comes to them
        self._pending: dict[Link, Tensor] = {}
        self._leaves: list[Leaf] = []
        self._handles: list[Any] = []
        self._workspace: Workspace | None = None
        self._nested = False
        self._is_quiet = False  # neither create_graph nor autocast
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
        for variable, _, grad, copy in self._leaves:
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
        return graphs.prepare_saved(self._graph.nodes, self._plan.saved)

    def _start(self, grads: Sequence[Tensor | None]) -> None:
        if self._nested:
            return
        self._unhook()
        self._forget()
        plan, nodes = self._plan, self._graph.nodes
        all_there = self._readable
        if self._starts_later:  # by whatever backward the user calls
            written = {graphs.running_backward_accumulates(nodes[place]) for place in plan.leaves}
            if written == {False}:  # torch.autograd.grad on an attached loss: there is nothing to write
                return
            all_there = self._prepare_saved() and False not in written
        # not where torch leaves parts of the graph alone, or what rules read comes back only when torch gets there
        self._ahead = plan.ahead if all_there else frozenset[int]()
        other = _RUNNING.get(graphs.running_backward())
        if other is not None:
            other.abort()
            self.disarm()
            raise RuntimeError(_TWO_LOSSES)
        _RUNNING[graphs.running_backward()] = self
        graphs.when_backward_ends(self._finish)
        if graphs.running_backward_frees():
            self._handles.append(self._arming)
        self._is_quiet = not torch.is_grad_enabled() and not any(map(torch.is_autocast_enabled, _CAST))
        if plan.owner is not None:
            self._workspace = workspace_of(graphs.leaf_of(nodes[plan.owner]))
        if self._workspace is not None:
            self._workspace.begin_pass(factored=self._factored)
        if self._seed is not None:
            self._pending[plan.start] = self._seed
        walk = weakref.ref(self)
        for stop in plan.waiting if self._ahead else plan.stops[1:]:
            self._handles.append(graphs.on_arrival(nodes[stop.place], _hook(walk, stop)))
        self.visit(plan.stops[0], grads)

    def visit(self, stop: Stop, grads: Sequence[Tensor | None]) -> None:
        """What happens at one stop, once torch has its gradient, and at those behind it that need none."""
        if self._nested:
            return
        self._nested = True  # second derivatives may run nodes that carry our hooks
        before = lend_from(self._workspace)
        try:
            if self._is_quiet:
                self._move_along(stop, grads)
            else:
                with _recording_and_casting_off():
                    self._move_along(stop, grads)
        except BaseException:
            self.abort()
            raise
        finally:
            lend_from(before)
            self._nested = False

    def _move_along(self, stop: Stop, grads: Sequence[Tensor | None]) -> None:
        self._move(stop, [widened(grad) for grad in grads] if stop.is_loss else stop.no_gradient)
        if not self._ahead:
            return
        for follower in stop.train:
            self._move(follower, follower.no_gradient)
        pending, nodes, leaves = self._pending, self._graph.nodes, self._leaves
        for place, link in stop.ends:
            variable = graphs.leaf_of(nodes[place])
            if variable.grad is None:
                leaves.append((variable, pending.pop(link, None), None, None))
            else:
                self._arrive(place, pending.pop(link, None))

    def _move(self, stop: Stop, g: Curvatures) -> None:
        """Moves curvature over one node."""
        pending = self._pending
        s = self._taken(stop) if stop.output is None else (pending.pop(stop.output, None),)
        if stop.is_plain:
            curvatures = stop.rule(self._graph.nodes[stop.place], s, g, stop.wanted)  # type: ignore[misc]
        elif stop.rule is None:
            self._arrive(stop.place, s[0])
            return
        elif stop.region is not None:
            self._move_over(stop.region, s, g)
            return
        else:
            curvatures = self._special(stop, s, g)
        for link, curvature, dtype in zip(stop.inputs, curvatures, stop.dtypes, strict=True):
            if curvature is None or link is None:
                continue
            if curvature.dtype is dtype and link not in pending:
                pending[link] = curvature
            else:
                self._give(link, curvature, dtype)

    def _taken(self, stop: Stop) -> Curvatures:
        pending, targets = self._pending, self._plan.targets
        return [pending.get(link) if link in targets else pending.pop(link, None) for link in stop.outputs]

    def _move_over(self, region: Region, s: Curvatures, g: Curvatures) -> None:
        for link, curvature in region_curvatures(region, self._graph, s[0], g[0], self._plan.targets):
            if curvature is not None:
                self._give(link, curvature, self._plan.dtypes[link])

    def _special(self, stop: Stop, s: Curvatures, g: Curvatures) -> Curvatures:
        node: Any = self._graph.nodes[stop.place]
        seen = Widened(node) if stop.is_half else node
        if isinstance(stop.rule, Rebuilt):
            return _walk_rebuilt(stop.rule, seen, s, g, self._plan.method)
        assert stop.rule is not None
        return stop.rule(seen, s, g, stop.wanted)

    def _give(self, link: Link, curvature: Tensor, dtype: torch.dtype | None) -> None:
        """Fan-out: what several consumers say of one tensor is added; their cross terms are what HesScale drops."""
        if curvature.dtype is not dtype:
            curvature = curvature.to(dtype)
        pending = self._pending
        pending[link] = pending[link] + curvature if link in pending else curvature

    def _arrive(self, place: int, s: Tensor | None) -> None:
        node = self._graph.nodes[place]
        variable = graphs.leaf_of(node)
        if variable.grad is None:
            self._leaves.append((variable, s, None, None))
        elif place in self._ahead:  # some hook may still change it
            walk = weakref.ref(self)
            self._handles.append(graphs.on_arrival(node, lambda grads: _note(walk, variable, s)))
        else:
            self.note(variable, s)

    def note(self, variable: Tensor, s: Tensor | None) -> None:
        """Keeps what is to be written to a leaf, and what to restore if the pass fails."""
        grad = variable.grad
        self._leaves.append((variable, s, grad, None if grad is None else grad.detach().clone()))

    def _finish(self) -> None:
        """Writes ``p.curvature`` wherever torch has written ``p.grad``."""
        with torch.no_grad():
            self._write()
        self._unhook()
        if not self._plan.targets:
            self._forget()

    def _write(self) -> None:
        taken = self._storages_of_others()
        simple = bool(self._leaves) and _are_owned(self._leaves, taken)
        for variable, s, grad, _ in self._leaves:
            old = None if simple or grad is None else getattr(variable, "curvature", None)
            if old is None:
                variable.curvature = s if simple else _owned(s, variable, taken)  # type: ignore[attr-defined]
            elif s is not None:
                variable.curvature = old.to(s).add_(s)  # type: ignore[attr-defined]  # the model may have moved

    def _storages_of_others(self) -> set[int]:
        return set() if self._seed is None else {self._seed.untyped_storage().data_ptr()}

    def _unhook(self) -> None:
        _remove_all(self._handles)

    def _forget(self) -> None:
        self._pending.clear()
        self._leaves.clear()


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


@contextlib.contextmanager
def _recording_and_casting_off() -> Iterator[None]:
    """Rules record nothing, and compute in the precision of what they are given."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for kind in _CAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


_CAST: Final = ("cpu", "cuda")


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


def _are_owned(leaves: Sequence[Leaf], taken: set[int]) -> bool:
    """Whether ``_owned`` would return each s as it is, and none is to be added to another: nearly always so."""
    variables: tuple[Any, ...]
    variables, found, grads, _ = zip(*leaves, strict=True)
    if not {None}.issuperset(grads) or not _OWNABLE.issuperset(map(type, found)):
        return False
    if Outer in map(type, found):
        return _are_factored_or_owned(leaves, taken)
    storages = [*map(Tensor.untyped_storage, found)]
    memories = {*map(_memory, storages)}
    return (
        len(memories) == len(found)
        and memories.isdisjoint(taken)
        and not any(map(_requires_grad, found))
        and not any(map(Tensor._is_zerotensor, found))
        and [*map(_nbytes, storages)] == [*map(_size, found)]
        and [*map(Tensor.stride, found)] == [*map(Tensor.stride, variables)]
    )


def _are_factored_or_owned(leaves: Sequence[Leaf], taken: set[int]) -> bool:
    """The same where some are not written out: each must be the only one of its kind, and as its leaf would have it."""
    rest = [leaf for leaf in leaves if type(leaf[1]) is Tensor]
    factored = [(variable, s) for variable, s, _, _ in leaves if isinstance(s, Outer)]
    return (
        len({id(s) for _, s in factored}) == len(factored)
        and all(factors_of(s) is not None and s.stride() == variable.stride() for variable, s in factored)
        and (not rest or _are_owned(rest, taken))
    )


_OWNABLE: Final = {Tensor, Outer}
_memory, _nbytes = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes
_requires_grad, _size = attrgetter("requires_grad"), attrgetter("nbytes")


def _owned(s: Tensor | None, like: Tensor, taken: set[int]) -> Tensor:
    """``s`` laid out like ``like`` in memory of its own, which is added to ``taken``; zeros if there is no ``s``."""
    if s is None or s._is_zerotensor():  # torch's zeros without memory
        return torch.zeros_like(like, requires_grad=False)
    s = written_out(s)
    storage = s.untyped_storage()
    memory = storage.data_ptr()
    if storage.nbytes() == s.nbytes and memory not in taken and s.stride() == like.stride():
        taken.add(memory)
        return s.detach() if s.requires_grad else s
    return torch.empty_like(like, dtype=s.dtype, requires_grad=False).copy_(s)
