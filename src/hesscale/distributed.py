"""Curvature over several processes: averaged as gradients are, in few large messages, and only when it is due.

Replicated parameters (DDP) are averaged once per step, whatever the number of micro-batches. Parameters sharded by
``fully_shard`` leave each backward pass with curvature on the whole parameter, which is averaged and cut into shards
at the end of that pass.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .fsdp import has_whole_gradient, sharded_modules, shards_of, whole_of
from .graph import running_backward, tensors_in, when_backward_ends, wide
from .leaves import drop_if_cleared, set_curvature
from .rules import RULES
from .rules.families import Coupled

MESSAGE = 2**26
"""Entries in one message: enough to make its start-up cost small, few enough to bound the memory it takes."""

_PASS_THROUGH = Coupled(lambda node, s, g: tuple(s), outputs=2, linear=True)
"""Nodes that hand on what they get. They must not be called to find that out: they start communication."""

RULES.register(_PASS_THROUGH, "RegisterPostBackwardFunctionBackward", "_DDPSinkBackward")


class Optimizer(Protocol):
    """What is asked of an optimizer."""

    param_groups: list[dict[str, Any]]

    def register_curvature_hook(self, hook: Callable[[Any], None]) -> None: ...


def synchronize(optimizer: Optimizer, model: nn.Module, *, group: Any = None) -> None:
    """Makes every step of ``optimizer`` use curvature averaged over the processes that train ``model``.

    Call it once, after ``DistributedDataParallel(model)`` and before training; for ``fully_shard(model)`` it is not
    needed. ``group``: the processes that hold copies of the model; by default those of DDP, or all. Afterwards
    ``optimizer.backward(loss)`` and ``optimizer.attach(loss).backward()`` work as in one process.

    >>> model = nn.Linear(4, 3)  # in several processes: DistributedDataParallel(nn.Linear(4, 3))
    >>> optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3)
    >>> hesscale.distributed.synchronize(optimizer, model)
    """
    sharded = [module for module in model.modules() if shards_of(module)]
    if sharded:
        _watch(sharded)
        optimizer.register_curvature_hook(lambda _: None)
        return
    if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    optimizer.register_curvature_hook(lambda it: average_curvature(_trainable(it), group))


def separate(optimizer: Optimizer) -> None:
    """Says that no other process trains a copy of this optimizer's model: its curvature is left as it is.

    Needed where that cannot be seen: a model that is in no DDP or FSDP wrapper beside one that is, such as a local
    critic beside a shared actor, is taken to be separate anyway.

    >>> model = nn.Linear(4, 3)  # one of several independent learners in one process group
    >>> optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3)
    >>> hesscale.distributed.separate(optimizer)
    """
    optimizer.register_curvature_hook(lambda _: None)


def looks_separate(params: Iterable[Tensor]) -> bool:
    """Whether models are shared with other processes here, and these parameters belong to none of them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    kinds = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel)
    shared = [*sharded_modules(), *(it for it in gc.get_objects() if issubclass(type(it), kinds))]
    known = {id(p) for module in shared for p in module.parameters()}
    return bool(shared) and not any(id(p) in known or hasattr(p, "to_local") for p in params)


def average_curvature(params: Iterable[Tensor], group: Any = None) -> None:
    """Replaces ``p.curvature`` by its average over the processes of ``group``, zero where a process has none.

    Every process must pass the same parameters. Where no process has any curvature, none is written. Alone, or without
    a process group, nothing changes.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hesscale.backward((w**3).sum())
    >>> hesscale.distributed.average_curvature([w])
    >>> w.curvature
    tensor([ 6., 12.])
    """
    params = list(params)
    count = dist.get_world_size(group) if dist.is_initialized() else 1
    if count == 1 or not params:
        return
    known = torch.tensor([float(_curvature(p) is not None) for p in params], device=params[0].device)
    dist.all_reduce(known, group=group)
    present = [p for p, number in zip(params, known.tolist(), strict=True) if number]
    with torch.no_grad():
        for batch in _batches(present):
            curvatures = [_curvature(p) for p in batch]
            message = torch.cat([_flat(h, p) for h, p in zip(curvatures, batch, strict=True)])
            dist.all_reduce(message, group=group)
            message /= count
            parts = message.split([p.numel() for p in batch])
            for p, h, part in zip(batch, curvatures, parts, strict=True):
                mean = torch.empty_like(p, dtype=wide(p.dtype), requires_grad=False).copy_(part.view(p.shape))
                set_curvature(p, mean, getattr(h, "method", None))


def _trainable(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _curvature(p: Tensor) -> Tensor | None:
    curvature: Tensor | None = getattr(p, "curvature", None)
    return curvature


def _flat(curvature: Tensor | None, p: Tensor) -> Tensor:
    if curvature is None:
        return torch.zeros(p.numel(), dtype=wide(p.dtype), device=p.device)
    return curvature.to(wide(p.dtype)).reshape(-1)


def _batches(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters of one kind and device, together not larger than one message (or alone)."""
    batches: list[list[Tensor]] = []
    room, kind = 0, None
    for p in sorted(params, key=lambda p: (str(p.device), str(p.dtype))):
        if (p.device, p.dtype) != kind or p.numel() > room:
            batches.append([])
            room, kind = MESSAGE, (p.device, p.dtype)
        batches[-1].append(p)
        room -= p.numel()
    return batches


def watch_shards(params: Iterable[Tensor]) -> bool:
    """Whether all parameters are shards of FSDP2, whose curvature then needs no further line."""
    params = [*params]
    if not params or not all(hasattr(p, "to_local") for p in params):
        return False
    wanted = {*map(id, params)}
    found = {module: {*map(id, module.parameters())} & wanted for module in sharded_modules()}
    if set().union(*found.values()) != wanted:
        return False
    _watch(module for module, own in found.items() if own)
    return True


_WATCHED: Final[WeakSet[nn.Module]] = WeakSet()


def _watch(modules: Iterable[nn.Module]) -> None:
    """Cuts curvature into shards at the end of each backward pass that meets these modules."""
    for module in modules:
        if module not in _WATCHED:
            _WATCHED.add(module)
            module.register_forward_hook(_await_backward)


def _await_backward(module: nn.Module, inputs: Any, output: Any) -> None:
    """A forward hook: the gradient that comes back to ``output`` is the sign that a backward pass meets the module."""
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: _PASS.meet(module))


class _Pass:
    """The sharded modules that the running backward pass has met."""

    def __init__(self) -> None:
        self.task = -1
        self.modules: dict[nn.Module, None] = {}

    def meet(self, module: nn.Module) -> None:
        """Before the module's gradients come in: what is the curvature of earlier gradients is dropped."""
        if self.task != running_backward():  # the one before may have failed
            self.task, self.modules = running_backward(), {}
        if module in self.modules:
            return
        for parameter in shards_of(module):
            if not has_whole_gradient(parameter):
                drop_if_cleared(parameter.sharded_param)
        if not self.modules:
            # the pass that writes curvature may queue itself after us, hence once more
            when_backward_ends(lambda: when_backward_ends(self.finish))
        self.modules[module] = None

    def finish(self) -> None:
        modules, self.modules = self.modules, {}
        _reduce_shards([parameter for module in modules for parameter in shards_of(module)])


_PASS: Final = _Pass()


def _reduce_shards(sharded: Sequence[Any]) -> None:
    """Moves curvature from whole parameters to shards, averaged: one reduce-scatter per message."""
    groups: dict[Any, list[Any]] = {}
    for parameter in sharded:
        if _curvature(whole_of(parameter)) is not None:
            p = parameter.sharded_param
            groups.setdefault((p.device_mesh, p.placements, p.dtype), []).append(parameter)
    for (mesh, placements, _), parameters in groups.items():
        _reduce_scatter(mesh, placements, parameters)


def _reduce_scatter(mesh: Any, placements: Sequence[Any], parameters: Sequence[Any]) -> None:
    """For parameters cut along one dimension over one dimension of ``mesh``, and copied over the others."""
    (over,) = (index for index, placement in enumerate(placements) if placement.is_shard())
    dim, size = placements[over].dim, mesh.size(over)
    rows: list[list[Tensor]] = [[] for _ in range(size)]
    for parameter in parameters:
        whole = whole_of(parameter).curvature.to(wide(parameter.sharded_param.dtype))
        chunks = list(whole.chunk(size, dim))
        for row, index in zip(rows, range(size), strict=True):
            row.append(_padded(chunks[index] if index < len(chunks) else None, chunks[0]))
    message = torch.cat([part for row in rows for part in row])
    shard = message.new_empty(message.numel() // size)
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its older name
    reduce_scatter(shard, message, group=mesh.get_group(over))
    for index in range(mesh.ndim):
        if index != over:
            dist.all_reduce(shard, group=mesh.get_group(index))
    shard /= mesh.size()
    lengths = [part.numel() for part in rows[0]]
    for parameter, part in zip(parameters, shard.split(lengths), strict=True):
        method = getattr(whole_of(parameter).curvature, "method", None)
        whole_of(parameter).curvature = None
        _add_shard(parameter.sharded_param, part, method)


def _padded(chunk: Tensor | None, largest: Tensor) -> Tensor:
    """The chunk as a vector as long as the largest: chunks of an uneven cut differ in length."""
    vector = largest.new_zeros(largest.numel())
    if chunk is not None:
        vector[: chunk.numel()] = chunk.reshape(-1)
    return vector


def _add_shard(p: Any, part: Tensor, method: str | None) -> None:
    from torch.distributed.tensor import DTensor

    held = p.to_local()
    fresh = part[: held.numel()].view(held.shape).clone()
    old = _curvature(p)
    if old is None:
        set_curvature(
            p, DTensor.from_local(fresh, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()), method
        )
    else:
        old.to_local().add_(fresh)  # type: ignore[attr-defined]
        set_curvature(p, old, getattr(old, "method", None))
