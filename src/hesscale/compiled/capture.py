"""What a compiled region computes: its forward pass, run once without values, and each backward pass behind it.

The forward pass leaves torch's own graph behind, as any forward pass does, and that graph is kept. A backward pass,
with curvature or without, walks it when it is first asked for. All operations are noted in one list of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, fx

from ..backward import derivatives
from ..graph import Graph, edge_of, graph_behind, plain_mode, storage_id, wide
from ..rules.families import NETWORK, Coupled, Inner
from ..rules.table import register
from .torch_compiler import fake_value, new_tracer, node_of, placeholder, without_values, writing
from .written_graph import ForwardRun, written_inputs

Maybe = Tensor | None

_RANK_OF_SYMBOLS = (
    "rank= needs sizes that are known, and this region was compiled with symbols for them: pass dynamic=False to "
    "torch.compile"
)
_SHARED = (
    "a compiled region writes to a tensor that shares its memory with another tensor that goes into it: clone one of "
    "the two before"
)


class Request(NamedTuple):
    """A backward pass of a region: what is given at its differentiable outputs, and what is asked for at its leaves."""

    gradients: tuple[bool, ...]  # whether each of these outputs has one
    curvatures: tuple[bool, ...] = ()
    wanted: tuple[bool, ...] = ()  # whether the curvature of each leaf is asked for
    inner: Inner | None = None  # None: no curvature


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
        self.living: Final = frozenset(index for index, value in enumerate(inputs) if _lives_anyhow(value))
        self.inputs = tuple(map(self._input, inputs))
        first = len(self.tracer.graph.nodes)
        with without_values(self.fake_mode):
            self.written: Final = written_inputs(module, self.inputs)
        refuse_shared([self.inputs[index] for index in self.written], self.inputs)
        with self._writing(), torch.enable_grad():
            values = [value.clone() if index in self.written else value for index, value in enumerate(self.inputs)]
            returned = ForwardRun(module, is_symbolic=self.is_symbolic).run(*values)
        self.returned: Final = len(returned)
        self.outputs: Final = (*returned, *(values[index] for index in self.written))
        self.forward = Written(self._nodes(0, first), self._nodes(first), self._nodes_of(self.outputs))
        self.leaves: Final = [value for value in self.inputs if isinstance(value, Tensor) and value.requires_grad]
        self.tops: Final = [out for out in self.outputs if isinstance(out, Tensor) and out.requires_grad]

    def _input(self, value: Any) -> Any:
        """Without values: a fresh leaf in place of a tensor that requires grad; a symbol as it is."""
        is_leaf = isinstance(value, Tensor) and value.requires_grad
        value = fake_value(self.fake_mode, value)
        if is_leaf:
            with self.fake_mode:
                value = value.detach().requires_grad_()
        placeholder(self.tracer, value)
        return value

    def backward(self, request: Request) -> Written:
        """Gradients of all leaves, or gradients and then curvatures of those asked for, from what is given."""
        start = len(self.tracer.graph.nodes)
        grads = [self._seed(top, top.dtype) if is_given else None for top, is_given in self._tops(request.gradients)]
        s = [self._seed(top, wide(top.dtype)) if is_given else None for top, is_given in self._tops(request.curvatures)]
        given = self._nodes(start)
        with self._writing(), plain_mode():
            results = self._gradients(grads) if request.inner is None else self._curvatures(request, grads, s)
        return Written(given, self._nodes(start + len(given)), self._nodes_of(results))

    def _tops(self, flags: Sequence[bool]) -> Iterable[tuple[Tensor, bool]]:
        return zip(self.tops, flags, strict=True) if flags else ()

    def _seed(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A new input like this output."""
        with self.fake_mode:
            seed = torch.empty_permuted(like.shape, order_of(like), dtype=dtype, device=like.device)
        placeholder(self.tracer, seed)
        return seed

    def _gradients(self, grads: Sequence[Maybe]) -> Sequence[Maybe]:
        tops, seeds = zip(*((top, g) for top, g in zip(self.tops, grads, strict=True) if g is not None), strict=True)
        return torch.autograd.grad(tops, self.leaves, seeds, retain_graph=True, allow_unused=True)

    def _curvatures(self, request: Request, grads: Sequence[Maybe], s: Sequence[Maybe]) -> Sequence[Maybe]:
        assert request.inner is not None
        leaves = [leaf for leaf, is_wanted in zip(self.leaves, request.wanted, strict=True) if is_wanted]
        given = [(top, g, h) for top, g, h in zip(self.tops, grads, s, strict=True) if not g is h is None]
        method, borders, missing, rank = request.inner
        if rank and self.is_symbolic:
            raise ValueError(_RANK_OF_SYMBOLS)
        output = [top for top, _, _ in given] if borders == NETWORK else [self.outputs[nr] for nr in borders]
        loss, gradient, curvature = given[0]
        if len(given) > 1 or curvature is not None:
            with torch.enable_grad():
                loss, gradient = Seeds.apply(*[top for top, _, _ in given]), None  # type: ignore[no-untyped-call]
            loss.grad_fn.seeds = [g for _, g, _ in given], [h for _, _, h in given]
        options: Any = {"method": method, "output": output or None, "missing": missing, "rank": rank}
        found = derivatives(loss, leaves, gradient, retain_graph=True, **options)
        return [tensor for tensors in found for tensor in tensors]

    def graph(self) -> Graph:
        """Torch's graph behind the outputs."""
        with self._writing(), torch.enable_grad():
            self._root: Tensor = Seeds.apply(*self.tops)  # type: ignore[no-untyped-call]  # nodes live as long as it does
        return graph_behind(edge_of(self._root)[0])

    def _writing(self) -> Any:
        return writing(self.tracer, self.fake_mode, symbolic=self.is_symbolic)

    def _nodes(self, start: int, end: int | None = None) -> list[fx.Node]:
        return [*self.tracer.graph.nodes][start:end]

    def _nodes_of(self, values: Sequence[Any]) -> list[Any]:
        return [node_of(self.tracer, value) for value in values]


def _lives_anyhow(value: Any) -> bool:
    """Whether it takes no memory to keep it: numbers, and parameters."""
    return not isinstance(value, Tensor) or (value.requires_grad and value.is_leaf)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Its dimensions as they lie in memory, the outermost first."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))


def refuse_shared(written: Sequence[Tensor], inputs: Sequence[Any]) -> None:
    """Raises if one of the inputs that are written to has its memory in common with another."""
    memory = Counter(storage_id(value) for value in inputs if isinstance(value, Tensor))
    if any(memory[storage_id(value)] > 1 for value in written):
        raise RuntimeError(_SHARED)


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
