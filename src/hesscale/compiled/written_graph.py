"""Graphs are run here, to write down what they do; which of its inputs a graph writes to, also without saying so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Final, final

import torch
from torch import Tensor, fx

from ..graph import storage_id
from .torch_compiler import as_one_node

_BATCH_NORM: Final = torch.ops.aten.native_batch_norm.default
_FUNCTIONAL: Final = torch.ops.aten._native_batch_norm_legit_functional.default
_STATISTICS: Final = slice(3, 5)  # arguments that batch norm writes to in training mode, although it does not say so


@final
class ForwardRun(fx.Interpreter):
    """Runs a graph of Dynamo's. With symbolic sizes torch would write ``interpolate`` as sums, without their cross terms."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One operation."""
        with as_one_node() if target is torch.nn.functional.interpolate else nullcontext():
            return super().call_function(target, args, kwargs)  # type: ignore[arg-type]


@final
class JointRun(fx.Interpreter):
    """Runs what was written down; batch norm's writes to its statistics are operations. Calls ``then`` after ``last``."""

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
        if target is not _BATCH_NORM or not _updates(args):
            return super().call_function(target, args, kwargs)  # type: ignore[arg-type]
        *results, mean, var = _FUNCTIONAL(*args)
        for old, new in zip(args[_STATISTICS], (mean, var), strict=True):
            old.copy_(new)
        return tuple(results)


def overwritten(module: fx.GraphModule) -> tuple[int, ...]:
    """Which of its inputs a graph writes to."""
    written = {_memory(given) for node in module.graph.nodes for given in _given_to_write(node)}
    inputs = module.graph.find_nodes(op="placeholder")
    return tuple(index for index, node in enumerate(inputs) if _memory(node) in written - {None})


def _updates(args: tuple[Any, ...]) -> bool:
    return bool(args[5]) and args[3] is not None


def _given_to_write(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments of a node that it writes to."""
    if node.target is _BATCH_NORM and _updates(node.args):
        yield from node.args[_STATISTICS]  # type: ignore[misc]
    schema: Any = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            for given in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(given, fx.Node):
                    yield given


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_id(value) if isinstance(value, Tensor) else None
