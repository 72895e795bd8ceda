"""What every estimator is given, and how it is kept from leaving traces in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..columns.dial import Rank
from ..graph import graph_of, refuse_hidden

LossFunction = Callable[[Any, Any], Tensor]
"""From a model's outputs and the targets to a scalar."""

_SIGNATURE = (
    "loss_fn is called as loss_fn(outputs, targets), with what the model has returned, and not as loss_fn(model, "
    "batch): {error}"
)


@dataclass(frozen=True)
class Problem:
    """One loss of one batch, the parameters whose diagonal is wanted, and the means to sample."""

    model: nn.Module
    loss_fn: LossFunction
    inputs: Any
    targets: Any
    params: Mapping[str, Tensor]
    samples: int
    generator: torch.Generator
    rank: Rank = 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameters, in the order of ``params``: the order of every estimator's result."""
        return tuple(self.params.values())

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How the model is called."""
        return arguments(self.inputs)

    def outputs(self) -> Any:
        """What the model says to the batch: one forward pass, as it is in training or evaluation mode."""
        return outputs(self.model, self.inputs)

    def loss(self, outputs: Any) -> Tensor:
        """The scalar loss of some outputs."""
        return loss_of(self.loss_fn, outputs, self.targets)


def loss_of(loss_fn: LossFunction, outputs: Any, targets: Any) -> Tensor:
    """The scalar loss, or an error that says what it has to be."""
    loss = called(loss_fn, outputs, targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise ValueError(f"loss_fn(outputs, targets) must return a scalar tensor, not one of {shape}")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any parameter that requires grad")
    refuse_hidden(graph_of(loss).rows)
    return loss


def called(loss_fn: LossFunction, outputs: Any, targets: Any) -> Any:
    """What a loss function returns, or an error that says how it is called."""
    try:
        return loss_fn(outputs, targets)
    except TypeError as error:
        at_the_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if at_the_call or str(error) == f"{type(outputs).__name__!r} object is not callable":
            raise TypeError(_SIGNATURE.format(error=error)) from error
        raise


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called: a tuple is several inputs, a mapping named ones, anything else the only one."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def outputs(model: nn.Module, inputs: Any) -> Any:
    """What a model says to a batch's inputs."""
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)


def chosen_parameters(model: nn.Module, names: Sequence[str] | None) -> dict[str, Tensor]:
    """The parameters of those names, or all that require grad."""
    known: dict[str, Tensor] = dict(model.named_parameters())
    if names is None:
        chosen = {name: p for name, p in known.items() if p.requires_grad}
        if not chosen:
            raise ValueError("no parameter of the model requires grad")
        return chosen
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"the model has no parameter {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
    frozen = [name for name in names if not known[name].requires_grad]
    if frozen:
        raise ValueError(f"these parameters do not require grad: {', '.join(frozen)}")
    return {name: known[name] for name in names}


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Buffers (batch-norm statistics, say) and torch's generators are afterwards what they were before.

    So are embeddings with ``max_norm``, which a forward pass shortens.

    So are attributes that would hold a graph, such as a weight that ``torch.nn.utils.prune`` masks in every forward
    pass: with one, a model cannot be copied. Others are left: they may belong to a cache whose size is noted elsewhere.
    """
    buffers = [(module, name) for module in model.modules() for name in module._buffers]
    before = [(module, name, module._buffers[name], _copy(module._buffers[name])) for module, name in buffers]
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    shortened = [m.weight for m in model.modules() if getattr(m, "max_norm", None) is not None and hasattr(m, "weight")]
    weights = [(weight, weight.detach().clone()) for weight in shortened if isinstance(weight, Tensor)]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=sorted(device.index for device in devices)):
            yield
    finally:
        for module, name, buffer, copy in before:
            if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)
            module._buffers[name] = buffer
        for weight, copy in weights:
            if not torch.equal(weight, copy):
                weight.detach().copy_(copy)
        for now, then in attributes:
            _put_back_graphs(now, then)


def _put_back_graphs(now: dict[str, Any], then: Mapping[str, Any]) -> None:
    recorded = [name for name, value in now.items() if isinstance(value, Tensor) and value.grad_fn is not None]
    for name in recorded:
        if name in then:
            now[name] = then[name]
        else:
            del now[name]


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()
