"""Curvature over several processes: averaged as gradients are, in few large messages, and only when it is due.

Replicated parameters (DDP) are averaged once per step, whatever the number of micro-batches. Parameters sharded by
``fully_shard`` leave each backward pass with curvature on the whole parameter, which is averaged and cut into shards
at the end of that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .graph import when_backward_ends
from .optim import CurvatureScaled
from .rules import RULES
from .rules.families import Coupled

MESSAGE = 2**26
"""Entries in one message: enough to make its start-up cost small, few enough to bound the memory it takes."""

_PASS_THROUGH = Coupled(lambda node, s, g: tuple(s), outputs=2, linear=True)
"""Nodes that hand on what they get. They must not be called to find that out: they start communication."""


def synchronize(optimizer: CurvatureScaled, model: nn.Module, *, group: Any = None) -> None:
    """Makes every step of ``optimizer`` use curvature averaged over the processes that train ``model``.

    Call it once, after ``DistributedDataParallel(model)`` or ``fully_shard(model)`` and before training. ``group``: the
    processes that hold copies of the model; by default those of DDP, or all. Afterwards ``optimizer.backward(loss)``
    and ``hesscale.attach(loss).backward()`` work as in one process.
    """
    for name in ("RegisterPostBackwardFunctionBackward", "_DDPSinkBackward"):
        if name not in RULES:
            RULES.register(_PASS_THROUGH, name)
    sharded = _sharded_parameters(model)
    if sharded:
        _reduce_after_backward(model, sharded)
        optimizer.register_curvature_hook(lambda _: None)
        return
    if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    optimizer.register_curvature_hook(lambda it: average_curvature(_parameters(it), group))


def average_curvature(params: Iterable[Tensor], group: Any = None) -> None:
    """Replaces ``p.curvature`` by its average over the processes of ``group``, zero where a process has none.

    Every process must pass the same parameters. Where no process has any curvature, none is written.
    """
    params = list(params)
    count = dist.get_world_size(group)
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
            for p, part in zip(batch, message.split([p.numel() for p in batch]), strict=True):
                p.curvature = torch.empty_like(p).copy_(part.view(p.shape))  # type: ignore[attr-defined]


def _parameters(optimizer: CurvatureScaled) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _curvature(p: Tensor) -> Tensor | None:
    curvature: Tensor | None = getattr(p, "curvature", None)
    return curvature


def _flat(curvature: Tensor | None, p: Tensor) -> Tensor:
    if curvature is None:
        return torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
    return curvature.to(p.dtype).reshape(-1)


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


def _sharded_parameters(model: nn.Module) -> list[Any]:
    """What FSDP2 knows of each parameter it has sharded: ``sharded_param`` is the optimizer's."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule  # not there in builds without distributed

    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            found += [parameter for each in groups if each is not None for parameter in each.fsdp_params]
    return found


def _reduce_after_backward(model: nn.Module, sharded: Sequence[Any]) -> None:
    waiting: list[Callable[[], None]] = []

    def finish() -> None:
        if len(waiting) > 1:  # the pass that writes curvature may have queued itself after us: once more, then
            waiting.pop()
            when_backward_ends(finish)
            return
        waiting.clear()
        _reduce_shards(sharded)

    def start(gradient: Tensor) -> None:
        if not waiting:
            for parameter in sharded:
                if parameter.sharded_param.grad is None:
                    parameter.sharded_param.curvature = None
            waiting.extend([finish, finish])
            when_backward_ends(finish)

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(start)

    model.register_forward_hook(watch)


def _tensors(output: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _reduce_shards(sharded: Sequence[Any]) -> None:
    """Moves curvature from whole parameters to shards, averaged: one reduce-scatter per message."""
    groups: dict[Any, list[Any]] = {}
    for parameter in sharded:
        if _curvature(getattr(parameter, "_unsharded_param", None)) is not None:  # type: ignore[arg-type]
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
        whole = parameter._unsharded_param.curvature.to(parameter.sharded_param.dtype)
        parameter._unsharded_param.curvature = None
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
        _add_shard(parameter.sharded_param, part)


def _padded(chunk: Tensor | None, largest: Tensor) -> Tensor:
    """The chunk as a vector as long as the largest: chunks of an uneven cut differ in length."""
    vector = largest.new_zeros(largest.numel())
    if chunk is not None:
        vector[: chunk.numel()] = chunk.reshape(-1)
    return vector


def _add_shard(p: Any, part: Tensor) -> None:
    from torch.distributed.tensor import DTensor

    held = p.to_local()
    fresh = part[: held.numel()].view(held.shape).clone()
    if p.curvature is None:
        p.curvature = DTensor.from_local(fresh, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    else:
        p.curvature.to_local().add_(fresh)
