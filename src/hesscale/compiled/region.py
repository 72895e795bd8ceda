"""A compiled region as torch and the walk meet it: one ``torch.autograd.Function``, with one rule."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..graph import Graph, Row, edge_of, storage_id
from ..plan import behind_nonlinear, look_up
from ..rules.fallback import ByAutograd
from ..rules.families import Composite, Curvatures, Inner
from ..rules.table import RULES
from ..wiring import Wiring, wire
from .capture import Capture, Request, order_of, refuse_shared
from .pieces import Backend, Code, Pieces
from .torch_compiler import broken_guards, guards_so_far, one_at_a_time

Maybe = Tensor | None

_OTHER_SIZES = (
    "the backward pass of a compiled region was compiled for sizes of which {guard}, and these are others: pass "
    "dynamic=False to torch.compile"
)
_CHANGED = (
    "a tensor that goes into a compiled region was written to between the forward and the backward pass, which needs "
    "its values: clone it before"
)


@final
class Region:
    """Compiled code for a graph of Dynamo's, and what has been asked of it so far."""

    def __init__(self, capture: Capture, backend: Backend) -> None:
        self.capture, self.pieces = capture, Pieces(capture, backend)
        tops, leaves = {*map(id, capture.tops)}, {*map(id, capture.leaves)}
        self.tops: Final = [index for index, out in enumerate(capture.outputs) if id(out) in tops]
        self.leaves: Final = [index for index, value in enumerate(capture.inputs) if id(value) in leaves]
        self.edges: Final = [index for index, value in enumerate(capture.inputs) if isinstance(value, Tensor)]
        self.orders: Final = [order_of(out) for out in capture.tops]
        self.views: Final = _views(capture.inputs, capture.outputs[: capture.returned])
        self._guarded: Final = guards_so_far(capture.fake_mode)
        self._codes: Final[dict[Request, Code]] = {}
        self._function = _function_of(self)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """What the graph returns."""
        if self.capture.written:
            refuse_shared([inputs[index] for index in self.capture.written], inputs)
        written = (*self.capture.written, *self.pieces.updated)  # backward passes may need what they were
        given = [value.clone() if index in written else value for index, value in enumerate(inputs)]
        results, returned = self._function.apply(*given), self.capture.returned
        for index, new in zip(written, results[returned:], strict=True):
            old = inputs[index]
            with torch.set_grad_enabled(new.requires_grad and not (old.is_leaf and old.requires_grad)):
                old.copy_(new)
        values = [*inputs, *results]
        for place, base in self.views:  # autograd has to know it, in case that one of the two is written to
            view, whole = values[place], values[base]
            if storage_id(view) == storage_id(whole):
                values[place] = whole.as_strided(view.shape, view.stride(), view.storage_offset())
        return tuple(values[len(inputs) : len(inputs) + returned])

    def forward(self, ctx: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Outputs and new values of what is written to; what backward passes need is left in ``ctx``."""
        ctx.set_materialize_grads(False)
        results = self.pieces.forward(*inputs)
        outputs, kept = results[: self.pieces.count], results[self.pieces.count :]
        tensors = [value for value in kept if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.others = [None if isinstance(value, Tensor) else value for value in kept]
        ctx.region, ctx.ready = self, None
        remembered = [value if i in self.pieces.remembered else None for i, value in enumerate(inputs)]
        ctx.inputs = [(value, value._version if isinstance(value, Tensor) else 0) for value in remembered]
        ctx.mark_non_differentiable(
            *(out for i, out in enumerate(outputs) if i not in self.tops and isinstance(out, Tensor))
        )
        return tuple(outputs)

    def backward(self, ctx: Any, grads: Sequence[Maybe]) -> tuple[Maybe, ...]:
        """A gradient for each input: those that came with curvature, or else by a plain backward."""
        ready, ctx.ready = ctx.ready, None
        if ready is not None and all(a is b for a, b in zip(ready[0], grads, strict=True)):
            return self._at_inputs(ready[1])
        given = [grads[index] for index in self.tops]
        request = Request(tuple(grad is not None for grad in given))
        return self._at_inputs(self._run(request, ctx, given) if any(request.gradients) else [None] * len(self.leaves))

    def curvature(self, ctx: Any, inner: Inner, s: Curvatures, grads: Curvatures, wanted: Sequence[Any]) -> Curvatures:
        """The curvature of each tensor among the inputs; gradients are left for the node's own backward."""
        given, seeds = ([values[index] for index in self.tops] for values in (grads, s))
        is_wanted = tuple(shape is not None for shape in self.of_leaves(wanted))
        has_gradient, has_curvature = (tuple(value is not None for value in values) for values in (given, seeds))
        request = Request(has_gradient, has_curvature, is_wanted, inner)
        found = self._run(request, ctx, [*given, *seeds])
        half = len(found) // 2
        if all(is_wanted):
            ctx.ready = grads, found[:half]
        rest = iter(found[half:])
        at_inputs = self._at_inputs([next(rest) if flag else None for flag in is_wanted])
        return [at_inputs[index] for index in self.edges]

    def _run(self, request: Request, ctx: Any, seeds: Sequence[Maybe]) -> Sequence[Maybe]:
        code = self._codes.get(request)
        self._refuse_other_sizes(ctx.inputs)
        if code is None:
            with one_at_a_time():
                code = self._codes[request] = self.pieces.backward(request)
        tensors = iter(ctx.saved_tensors)
        kept = [next(tensors) if value is None else value for value in ctx.others]
        again = [ctx.inputs[index] for index in code.inputs]
        if any(isinstance(value, Tensor) and value._version != version for value, version in again):
            raise RuntimeError(_CHANGED)
        pairs = zip(seeds, itertools.cycle(self.orders), strict=False)
        dense = [laid_out(seed, order) for seed, order in pairs if seed is not None]
        found: Sequence[Maybe] = code.run(*[kept[index] for index in code.kept], *[value for value, _ in again], *dense)
        return found

    def _refuse_other_sizes(self, inputs: Sequence[tuple[Any, int]]) -> None:
        """A backward is compiled after Dynamo has written its guards: raises where it has taken more for granted."""
        if not self.capture.is_symbolic:
            return
        broken = broken_guards(
            self.capture.fake_mode, self._guarded, self.capture.inputs, [value for value, _ in inputs]
        )
        if broken:
            raise RuntimeError(_OTHER_SIZES.format(guard=broken[0]))

    def of_leaves(self, values: Sequence[Any]) -> list[Any]:
        """Those of the leaves, of values that belong to the tensors among all inputs."""
        return [values[self.edges.index(index)] for index in self.leaves]

    @functools.cached_property
    def graph(self) -> Graph:
        """Torch's graph of what the region computes, from a root that all outputs lead to."""
        return self.capture.graph()

    def _at_inputs(self, found: Sequence[Maybe]) -> tuple[Maybe, ...]:
        results: list[Maybe] = [None] * len(self.capture.inputs)
        for index, value in zip(self.leaves, found, strict=True):
            results[index] = value
        return tuple(results)


def _views(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Which outputs share the memory of which input, or of which output that has all of it; places among both."""
    values = [value if isinstance(value, Tensor) and value.requires_grad else None for value in (*inputs, *outputs)]
    bases: dict[int, int] = {}
    for place, value in enumerate(values):
        if value is not None and (
            place < len(inputs) or math.prod(value.shape) * value.itemsize == value.untyped_storage().nbytes()
        ):
            bases.setdefault(storage_id(value), place)
    shared = [(place, bases.get(storage_id(value), place)) for place, value in enumerate(values) if value is not None]
    return [(place, base) for place, base in shared if place >= len(inputs) and place != base]


def laid_out(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The same numbers, dense in memory, with dimensions in this order."""
    inverse = [order.index(dim) for dim in range(len(order))]
    return tensor.permute([*order]).contiguous().permute(inverse)


def _function_of(region: Region) -> Any:
    """A Function of its own for each region, since rules are found by class."""
    reference = weakref.ref(region)

    class CompiledRegion(torch.autograd.Function):
        """The region as one node."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            """By compiled code."""
            return _alive(reference).forward(ctx, inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Maybe) -> Any:
            """By compiled code, and not to be differentiated, even where the given gradients are constants."""
            return _backward(ctx, torch.empty(0, requires_grad=torch.is_grad_enabled()), *grads)

    RULES.register(CompiledRule(reference), CompiledRegion)
    weakref.finalize(region, RULES.unregister, CompiledRegion)
    return CompiledRegion


@once_differentiable
def _backward(ctx: Any, _: Tensor, *grads: Maybe) -> Any:
    return ctx.region.backward(ctx, grads)


def _alive(reference: Callable[[], Region | None]) -> Region:
    region = reference()
    assert region is not None  # who calls it holds it, or a node of it
    return region


@dataclass(frozen=True)
class CompiledRule(Composite):
    """What a compiled region does to curvature: whatever the operations inside do, by code of its own."""

    region: Callable[[], Region | None]  # held by its nodes, not by the table of rules
    inner: Inner | None = None

    @property
    def rows(self) -> Sequence[Row]:
        return _alive(self.region).graph.rows

    def wiring(self, wanted: Sequence[torch.Size | None]) -> Wiring:
        region = _alive(self.region)
        edges = [
            edge_of(leaf)
            for leaf, shape in zip(region.capture.leaves, region.of_leaves(wanted), strict=True)
            if shape is not None
        ]
        return wire(region.graph.rows, [region.graph.link(edge) for edge in edges if edge[0] in region.graph.places])

    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        wiring = self.wiring(wanted)
        return not behind_nonlinear(wiring, look_up(self.rows, wiring, RULES, ByAutograd()))

    def within(self, inner: Inner) -> CompiledRule:
        return replace(self, inner=inner)

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        assert self.inner is not None
        return _alive(self.region).curvature(node, self.inner, s, g, wanted)
