"""A graph as it was written down: what it writes to, what it holds, and a form that any backend may lay out anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from ..graph import storage_id

_BATCH_NORMS: Final = frozenset(
    getattr(torch.ops.aten, name).default for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)
_STATISTICS: Final = (3, 4)  # arguments that these write to while training, although their schema does not say so


def relaxed(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph, in which views may become copies, wherever nothing is written to their memory afterwards.

    A backend may lay tensors out otherwise than they were while tracing (Inductor does so with ``cat``), and a view
    that was one then need not be one any more.
    """
    written: set[int] = set()
    for node in reversed(module.graph.nodes):
        if node.target is torch.ops.aten.view.default and _memory(node) not in written:
            node.target = torch.ops.aten.reshape.default
        written.update(_written_by(node))
    module.recompile()
    return module


def overwritten(module: torch.fx.GraphModule) -> tuple[int, ...]:
    """Which of its inputs a graph writes to."""
    written = {memory for node in module.graph.nodes for memory in _written_by(node)}
    inputs = (node for node in module.graph.nodes if node.op == "placeholder")
    return tuple(index for index, node in enumerate(inputs) if _memory(node) in written)


def constants(module: torch.fx.GraphModule) -> list[Tensor]:
    """The tensors that a graph holds."""
    return [value for _, value in _held(module) if isinstance(value, Tensor)]


def overwritten_constants(module: torch.fx.GraphModule) -> frozenset[int]:
    """The memory, among that of its constants, which a graph writes to, be it through a view."""
    held: dict[torch.fx.Node, int] = {}  # nodes that are a constant, or lie in its memory
    written: set[int] = set()
    for node in module.graph.nodes:
        value = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(value, Tensor):
            held[node] = storage_id(value)
        elif hasattr(node.target, "_schema"):
            written.update(held[given] for given in _given_to_write(node) if given in held)
            if any(value.alias_info is not None for value in node.target._schema.returns) and node.args[0] in held:
                held[node] = held[node.args[0]]
    return frozenset(written)


def holds_generator(module: torch.fx.GraphModule) -> bool:
    """Whether some operation draws from a generator of somebody's own."""
    given = [value for _, value in _held(module)]
    for node in module.graph.nodes:
        given += [*node.args, *node.kwargs.values()]
    return any(isinstance(value, torch.Generator) for value in given)


def _held(module: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, Any]]:
    for node in module.graph.nodes:
        if node.op == "get_attr":
            yield node, getattr(module, str(node.target), None)


def _written_by(node: torch.fx.Node) -> Iterator[int]:
    """The memory that a node writes to."""
    for given in _given_to_write(node):
        memory = _memory(given)
        if memory is not None:
            yield memory


def _given_to_write(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The arguments of a node that it writes to."""
    schema: Any = getattr(node.target, "_schema", None)
    unsaid = _STATISTICS if node.target in _BATCH_NORMS else ()
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if place in unsaid or (argument.alias_info is not None and argument.alias_info.is_write):
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            for given in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(given, torch.fx.Node):
                    yield given


def _memory(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_id(value) if isinstance(value, Tensor) else None
