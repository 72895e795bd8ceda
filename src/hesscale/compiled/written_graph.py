"""Graphs are run here, to write down what they do; and which of its inputs a graph writes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, final

import torch
from torch import Tensor, fx

from .torch_compiler import as_one_node

_CHECKPOINT: Final = torch.ops.higher_order.tag_activation_checkpoint
_BATCH_NORM: Final = torch.ops.aten.native_batch_norm.default
_BATCH_NORM_BACKWARD: Final = torch.ops.aten.native_batch_norm_backward.default
_FUNCTIONAL: Final = torch.ops.aten._native_batch_norm_legit_functional.default
_STATISTICS: Final = slice(3, 5)  # arguments that batch norm writes to in training mode, although it does not say so


@final
class ForwardRun(fx.Interpreter):
    """Runs a graph of Dynamo's. With symbolic sizes torch would take ``interpolate`` apart, and drop cross terms."""

    def __init__(self, module: fx.GraphModule, *, is_symbolic: bool) -> None:
        super().__init__(module)
        self._is_symbolic = is_symbolic

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One operation."""
        if target is _CHECKPOINT:  # what is computed again is the partitioner's choice, and never random numbers
            module, *inputs = args
            return ForwardRun(module, is_symbolic=self._is_symbolic).run(*inputs)
        is_apart = self._is_symbolic and target is torch.nn.functional.interpolate
        with as_one_node() if is_apart else nullcontext():
            return super().call_function(target, args, kwargs)  # type: ignore[arg-type]


@final
class JointRun(fx.Interpreter):
    """Runs what was written down; batch norm's writes are operations of their own. Calls ``then`` after ``last``."""

    def __init__(self, module: fx.GraphModule, last: fx.Node, then: Callable[[], None]) -> None:
        super().__init__(module)
        self._last, self._then = last, then

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        value = super().run_node(n)
        if n is self._last:
            self._then()
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One operation."""
        if target is _BATCH_NORM_BACKWARD and args[7]:  # in training mode it does not look at them
            args = (*args[:3], None, None, *args[5:])
        if target is not _BATCH_NORM or not _updates(args):
            return super().call_function(target, args, kwargs)  # type: ignore[arg-type]
        *results, mean, var = _FUNCTIONAL(*args)
        for old, new in zip(args[_STATISTICS], (mean, var), strict=True):
            old.copy_(new)
        return tuple(results)


def written_inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Which of its inputs, tensors without values, a graph of Dynamo's writes to."""
    examples = (node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder"))
    if not any(isinstance(value, Tensor) and value._version for value in examples):  # Dynamo has run it before
        return ()
    tensors = {index: value for index, value in enumerate(inputs) if isinstance(value, Tensor)}
    before = {index: value._version for index, value in tensors.items()}
    with torch.no_grad():
        fx.Interpreter(module).run(*inputs)
    return tuple(index for index, value in tensors.items() if value._version > before[index])


def updated_inputs(graph: fx.Graph) -> tuple[int, ...]:
    """Which inputs the operations of a graph write to, batch norm's statistics among them."""
    updated = {given for node in graph.nodes for given in _given_to_write(node)}
    return tuple(index for index, node in enumerate(graph.find_nodes(op="placeholder")) if node in updated)


def _updates(args: tuple[Any, ...]) -> bool:
    return bool(args[5]) and args[3] is not None


def _given_to_write(node: fx.Node) -> Iterator[Any]:
    """The arguments of a node that it writes to."""
    if node.target is _BATCH_NORM and _updates(node.args):
        yield from node.args[_STATISTICS]
    schema: Any = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else [value]
