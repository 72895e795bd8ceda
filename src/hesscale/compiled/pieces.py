"""From what a region computes to compiled code: a forward, its plain backward, and a backward for each request.

The forward keeps what the plain backward needs, and what curvature would otherwise have to compute again at a price.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor, fx

from ..rules.families import Inner
from .capture import Capture, Request, Written
from .torch_compiler import (
    functional,
    is_random,
    is_recomputable,
    label,
    label_so_far,
    lowered,
    partitioned,
    results_of,
)
from .written_graph import JointRun, updated_inputs

Run = Callable[..., Any]

_GONE = (
    "this pass needs what the forward pass of a compiled region has not kept, a tensor or random numbers: compute the "
    "loss within `with torch.compiler.set_stance('force_eager'):`"
)


@dataclass(frozen=True)
class Backend:
    """Which backend of torch.compile compiles the pieces, with which of Inductor's options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Code:
    """Compiled code of a backward, and which of the tensors that the forward has kept, and of its inputs, go in."""

    run: Run
    kept: Sequence[int]
    inputs: Sequence[int]


@final
class Pieces:
    """The compiled code of one region. A backward is compiled when it first runs."""

    def __init__(self, capture: Capture, backend: Backend) -> None:
        self._capture, self._backend = capture, backend
        self.updated: Final = updated_inputs(self._raw(None).graph)
        self.count: Final = len(capture.outputs) + len(self.updated)
        self.all: Final = Request((True,) * len(capture.tops))
        forward, self._plain = partitioned(self._joint(self.all), self.count)
        self.remembered: Final = self._keep_more(forward)
        kept = results_of(forward)[self.count :]
        self._names: Final = [node.name for node in kept]
        self._kept: Final = {name: index for index, node in enumerate(kept) if (name := label(node)) is not None}
        visible = None if capture.is_symbolic else self.count
        name, options = backend.name, backend.options
        self.forward, strides = lowered(forward, capture.fake_mode, name, options, visible=visible)
        self._strides = strides[self.count :] or [None] * len(kept)

    def backward(self, request: Request) -> Code:
        """What computes this from what the forward has kept, and from seeds."""
        if request == self.all:
            names = [node.name for node in self._plain.graph.find_nodes(op="placeholder")]
            kept = [self._names.index(name) for name in names if name in self._names]
            return Code(self._lowered(self._plain, kept), kept, [])
        joint = self._joint(request)
        inputs, results = joint.graph.find_nodes(op="placeholder"), results_of(joint)[self.count :]
        seeds = inputs[len(self._capture.inputs) :]
        ends = {node: index for node in joint.graph.nodes if (index := self._kept.get(label(node))) is not None}
        symbols = {node for node in inputs if not isinstance(node.meta["val"], Tensor)}  # sizes are computed from them
        needed = _leading_to(results, {*ends, *inputs}) | symbols
        own = {index: node for node, index in ends.items() if node in needed}
        again = [index for index, node in enumerate(inputs[: -len(seeds)]) if node in needed and node not in ends]
        is_drawn = any(is_random(node) and label(node) is not None for node in needed if node not in own.values())
        if is_drawn or not self.remembered.issuperset(again):
            raise RuntimeError(_GONE)
        starts = [*own.values(), *(inputs[index] for index in again), *seeds]
        same = {node: own[index] for node, index in ends.items() if index in own}
        return Code(self._lowered(_cut_off(joint, starts, same, needed, results), [*own]), [*own], again)

    def _keep_more(self, forward: fx.GraphModule) -> frozenset[int]:
        """Makes the forward keep what curvature would otherwise be computed from again, where that is dear or wrong.

        Returns which of the inputs it is computed from as well; those that live anyhow always count.
        """
        count = len(self._capture.tops)
        inner = Inner("hesscale", missing="exact")
        everything = Request((True,) * count, (True,) * count, (True,) * len(self._capture.leaves), inner)
        try:
            joint = self._joint(everything)
        except Exception:  # whoever asks for curvature is told
            return self._capture.living
        made = {name: node for node in forward.graph.nodes if (name := label(node)) is not None}
        kept = {label(node) for node in results_of(forward)[self.count :]}
        dear = {node for node in joint.graph.nodes if label(node) in made and _is_dear(node)}
        ends = {node for node in joint.graph.nodes if label(node) in made.keys() & kept} | dear
        needed = _leading_to(results_of(joint)[self.count :], ends)
        more = {label(node) for node in needed & dear}
        forward.graph.output_node().args = ([*results_of(forward), *(made[name] for name in sorted(more - kept))],)
        forward.recompile()
        given = joint.graph.find_nodes(op="placeholder")[: len(self._capture.inputs)]
        return self._capture.living.union(index for index, node in enumerate(given) if node in needed)

    def _lowered(self, module: fx.GraphModule, kept: Sequence[int]) -> Run:
        """A backward, whose first inputs are these of what is kept."""
        for node, index in zip(module.graph.find_nodes(op="placeholder"), kept, strict=False):
            value, strides = node.meta["val"], self._strides[index]
            if strides is not None and isinstance(value, Tensor):
                with self._capture.fake_mode:
                    node.meta["val"] = value.as_strided(value.shape, strides)
        return lowered(module, self._capture.fake_mode, self._backend.name, self._backend.options)[0]

    def _raw(self, backward: Written | None) -> fx.GraphModule:
        """The forward, and a backward behind it, as they were written down: with writes and views."""
        forward = self._capture.forward
        given = [*forward.given, *(backward.given if backward else ())]
        done = [*forward.nodes, *(backward.nodes if backward else ())]
        results = [*forward.results, *(backward.results if backward else ())]
        needed = {*done, *_leading_to([*done, *results], {*given})}  # sizes may have been read for another backward
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in (*given, *(node for node in self._capture.tracer.graph.nodes if node in needed)):
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies.get(result, result) for result in results])
        return fx.GraphModule(self._capture.tracer.root, graph)

    def _joint(self, request: Request) -> fx.GraphModule:
        """Outputs, new values of inputs that are written to, and what the backward computes."""
        backward, capture = self._capture.backward(request), self._capture
        raw = self._raw(backward)
        last = {node.name: node for node in raw.graph.nodes}[capture.forward.nodes[-1].name]
        outputs = len(capture.outputs)

        def run(primals: Sequence[Any], tangents: Sequence[Tensor]) -> list[Any]:
            inputs = [value.clone() if index in self.updated else value for index, value in enumerate(primals)]
            results = JointRun(raw, last, label_so_far).run(*inputs, *tangents)
            return [*results[:outputs], *(inputs[index] for index in self.updated), *results[outputs:]]

        # numbers of Python's that Dynamo has made tensors of are known by these, and not by another view of them
        inputs = [v.detach() if isinstance(v, Tensor) and v.requires_grad else v for v in capture.inputs]
        seeds = [node.meta["val"] for node in backward.given]
        return functional(run, capture.fake_mode, inputs, seeds, self._backend.name)


def _is_dear(node: fx.Node) -> bool:
    """Whether a tensor is better kept than computed again."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    return not is_recomputable(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _leading_to(results: Sequence[Any], ends: Container[fx.Node]) -> set[fx.Node]:
    """The nodes that results are computed from, back to ``ends``."""
    needed: set[fx.Node] = set()
    waiting = [node for node in results if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += () if node in ends else node.all_input_nodes
    return needed


def _cut_off(
    joint: fx.GraphModule,
    inputs: Sequence[fx.Node],
    same: Mapping[fx.Node, fx.Node],  # nodes that are one of the inputs
    needed: Container[fx.Node],
    results: Sequence[Any],
) -> fx.GraphModule:
    """The part of a joint graph that computes ``results`` from ``inputs``."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta
    copies.update({node: copies[one] for node, one in same.items()})
    for node in joint.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies.get(node) for node in results])
    return fx.GraphModule(joint, graph)
