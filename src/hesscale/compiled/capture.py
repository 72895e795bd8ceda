"""What a compiled region computes: its forward pass, run once without values, and each backward pass behind it.

The forward pass leaves torch's own graph behind, as any forward pass does, and that graph is kept. A backward pass, with
curvature or without, walks it when it is first asked for. All of their operations are noted in one list of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, fx

from ..backward import derivatives
from ..graph import Graph, edge_of, graph_behind, plain_mode, wide
from ..rules.families import NETWORK, Coupled, Inner
from ..rules.table import register
from .torch_compiler import fake_value, new_tracer, node_of, placeholder, writing

Maybe = Tensor | None


class Request(NamedTuple):
    """A backward pass of a region: what is given at its outputs, and what is asked for at its inputs."""

    inner: Inner
    curvature: tuple[bool, ...]  # whether each output that has a gradient brings curvature with it
    wanted: tuple[bool, ...]  # whether the curvature of each leaf is asked for


@dataclass(frozen=True)
class Written:
    """A stretch of the list of nodes: what goes in, what is done, and what comes out."""

    given: Sequence[fx.Node]
    nodes: Sequence[fx.Node]
    results: Sequence[Any]  # nodes, numbers, or None


@final
class Capture:
    """A forward pass without values, and torch's graph of it."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any) -> None:
        self.fake_mode: Final = fake_mode
        self.is_symbolic: Final = any(not isinstance(value, Tensor) for value in inputs)
        self.tracer: Final = new_tracer()
        self.inputs = tuple(map(self._input, inputs))
        first = len(self.tracer.graph.nodes)
        with self._writing(), torch.enable_grad():
            self.outputs = tuple(fx.Interpreter(module).run(*self.inputs))
        self.forward = Written(self._nodes(0, first), self._nodes(first), self._nodes_of(self.outputs))
        self.leaves: Final = [value for value in self.inputs if isinstance(value, Tensor) and value.requires_grad]
        self.tops: Final = [out for out in self.outputs if isinstance(out, Tensor) and out.requires_grad]

    def _input(self, value: Any) -> Any:
        """A fresh leaf in place of a tensor; a symbol as it is."""
        like, value = value, fake_value(self.fake_mode, value)
        if isinstance(value, Tensor):
            with self.fake_mode:
                value = value.detach().requires_grad_(like.requires_grad)
        placeholder(self.tracer, value)
        return value

    def plain(self) -> Written:
        """Gradients of all leaves, from those of all outputs that have one."""
        return self._backward(self.tops, lambda grads: _gradients(self.tops, self.leaves, grads))

    def curvature(self, request: Request) -> Written:
        """Gradients and curvatures of the leaves asked for, from gradients and curvatures of the outputs."""
        leaves = [leaf for leaf, is_wanted in zip(self.leaves, request.wanted, strict=True) if is_wanted]
        given = [out for out, has_curvature in zip(self.tops, request.curvature, strict=True) if has_curvature]

        def run(seeds: Sequence[Tensor]) -> Sequence[Maybe]:
            grads, rest = seeds[: len(self.tops)], iter(seeds[len(self.tops) :])
            curvatures = [next(rest) if has_curvature else None for has_curvature in request.curvature]
            with torch.enable_grad():
                loss = Seeds.apply(*self.tops)
            loss.grad_fn.seeds = grads, curvatures
            method, borders, missing, rank = request.inner
            output = self.tops if borders == NETWORK else [self.outputs[nr] for nr in borders]
            options: Any = {"missing": missing, "rank": rank, "retain_graph": True}
            found = derivatives(loss, leaves, method=method, output=output or None, **options)
            return [tensor for tensors in found for tensor in tensors]

        return self._backward([*self.tops, *given], run)

    def graph(self) -> Graph:
        """Torch's graph behind the outputs."""
        with self._writing(), torch.enable_grad():
            return graph_behind(edge_of(Seeds.apply(*self.tops))[0])

    def _backward(self, tops: Sequence[Tensor], run: Callable[[Sequence[Tensor]], Sequence[Maybe]]) -> Written:
        """What ``run`` does with seeds like ``tops``, the first of them gradients and the rest curvatures."""
        start = len(self.tracer.graph.nodes)
        seeds = []
        for index, like in enumerate(tops):
            is_gradient = index < len(self.tops)
            with self.fake_mode:
                dtype = like.dtype if is_gradient else wide(like.dtype)
                seeds.append(torch.empty_permuted(like.shape, order_of(like), dtype=dtype, device=like.device))
            placeholder(self.tracer, seeds[-1])
        given = self._nodes(start)
        with self._writing(), plain_mode():
            results = run(seeds)
        return Written(given, self._nodes(start + len(given)), self._nodes_of(results))

    def _writing(self) -> Any:
        return writing(self.tracer, self.fake_mode, symbolic=self.is_symbolic)

    def _nodes(self, start: int, end: int | None = None) -> list[fx.Node]:
        return [*self.tracer.graph.nodes][start:end]

    def _nodes_of(self, values: Sequence[Any]) -> list[Any]:
        return [node_of(self.tracer, value) for value in values]


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Its dimensions as they lie in memory, the outermost first."""
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))


def _gradients(tops: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Maybe]:
    return torch.autograd.grad(tops, leaves, grads, retain_graph=True, allow_unused=True)


@final
class Seeds(torch.autograd.Function):
    """A scalar whose gradient and curvature at each of the outputs are given: ``seeds`` on its node."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        """Any number will do."""
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The given gradients."""
        return tuple(ctx.seeds[0])


register(Coupled(lambda node, s, g: tuple(node.seeds[1]), linear=True), Seeds)
