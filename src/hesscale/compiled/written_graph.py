"""Graphs are run here, to write down what they do; and which of its inputs a graph writes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One operation."""
        if (
            target is _CHECKPOINT
        ):  # what to compute again is the partitioner's choice, and random numbers are none of it
            module, *inputs = args
            return ForwardRun(module).run(*inputs)
        with as_one_node() if target is torch.nn.functional.interpolate else nullcontext():
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


def is_written(example: Any) -> bool:
    """Whether Dynamo has seen a write to an input, of which this is its tensor without values."""
    return isinstance(example, Tensor) and example._version > 0


def updated_statistics(graph: fx.Graph) -> tuple[int, ...]:
    """Which inputs of a graph batch norm updates, without saying so."""
    norms = graph.find_nodes(op="call_function", target=_BATCH_NORM)
    updated = {given for node in norms if _updates(node.args) for given in node.args[_STATISTICS]}
    return tuple(index for index, node in enumerate(graph.find_nodes(op="placeholder")) if node in updated)


def _updates(args: tuple[Any, ...]) -> bool:
    return bool(args[5]) and args[3] is not None
