"""What an optimizer refuses, each in words that say what to do; nothing has changed when one of these raises."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..outer import factors_of, written_out
from .updates import SCALES, Place, Slot

_NO_CURVATURE = (
    "there is no fresh curvature for {name}: call optimizer.backward(loss) or hesscale.attach(loss).backward() "
    "before step()"
)
_ZERO_CURVATURE = (
    "curvature is zero everywhere in {names}, though the gradient is not: there is nothing to scale by, so it stays as "
    "it is. The loss is (piecewise) linear there, as absolute and hinge losses are: use another loss or optimizer"
)


_ALONE = (
    "{count} processes are training, but this optimizer uses the curvature of its own process only: call "
    "hesscale.distributed.synchronize(optimizer, model) once before training, or copies of the model will drift apart"
)
_WIDE = (torch.float32, torch.float64)


def refuse_bad_options(group: Mapping[str, Any], *, first: Mapping[str, Any]) -> None:
    """ValueError, with the value in it, unless the options of a group make sense, alone and beside the ``first``."""
    lr, eps = group["lr"], group["eps"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr as a tensor must have one element, not shape {tuple(lr.shape)}")
    if not lr >= 0.0:
        raise ValueError(f"lr must not be negative: {lr}")
    if not eps >= 0.0:
        raise ValueError(f"eps must not be negative: {eps}")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"both betas must lie in [0, 1): {group['betas']}")
    if not group["weight_decay"] >= 0.0:
        raise ValueError(f"weight_decay must not be negative: {group['weight_decay']}")
    if not isinstance(group["every"], int) or group["every"] < 1:
        raise ValueError(f"every must be a whole number of steps, 1 or more: {group['every']}")
    if group["trust_region"] is not None and not group["trust_region"] > 0.0:
        raise ValueError(f"trust_region must be positive or None: {group['trust_region']}")
    if group["trust_region"] != first["trust_region"]:
        raise ValueError("trust_region bounds the step of all groups together: it cannot differ between them")
    _refuse_bad_combinations(group)


def _refuse_bad_combinations(group: Mapping[str, Any]) -> None:
    if group["scale"] not in SCALES:
        raise ValueError(f"unknown scale {group['scale']!r}: choose one of {', '.join(map(repr, SCALES))}")
    if group["eps_inside_root"] and group["scale"] != "rms":
        raise ValueError(f"eps_inside_root needs a root: scale='rms', not {group['scale']!r}")
    if group["fused"] and group["foreach"]:
        raise ValueError("choose one of fused=True and foreach=True")
    if group["differentiable"] and (group["fused"] or group["foreach"]):
        raise ValueError("differentiable=True runs as a loop: leave fused and foreach alone")
    if group["capturable"] and group["every"] != 1:
        raise ValueError("a captured step is the same each time: capturable=True needs every=1")


def warn_if_alone(*, has_hooks: bool) -> None:
    """Warns where several processes train and nothing averages their curvature."""
    if not has_hooks and torch.distributed.is_available() and torch.distributed.is_initialized():
        count = torch.distributed.get_world_size()
        if count > 1:
            warnings.warn(_ALONE.format(count=count), stacklevel=5)


def name_of(group: Mapping[str, Any], index: int) -> str:
    """A parameter in words: its own name where the optimizer got ``named_parameters()``."""
    if "param_names" in group:
        return str(group["param_names"][index])
    return f"parameter {index} of its group, shape {tuple(group['params'][index].shape)}"


def fresh_curvature(p: Tensor, g: Tensor, place: Place, *, is_due: bool) -> Tensor | None:
    """``p.curvature``, None unless it is due; a RuntimeError unless it and the gradient are there, dense and real.

    Zeros where the gradient is zero too, which is what a parameter the loss never met has.
    """
    if p.dtype.is_complex:
        raise RuntimeError(f"{name_of(*place)} is complex: hesscale's optimizers work on real parameters only")
    if g.layout != torch.strided:
        raise RuntimeError(f"{name_of(*place)} has a sparse gradient: curvature is dense (nn.Embedding: sparse=False)")
    if not is_due:
        return None
    curvature: Tensor | None = getattr(p, "curvature", None)
    if curvature is None:
        if g.any():
            raise RuntimeError(_NO_CURVATURE.format(name=name_of(*place)))
        return torch.zeros_like(p, requires_grad=False)
    if curvature.shape != p.shape:
        raise RuntimeError(
            f"the curvature of {name_of(*place)} has shape {tuple(curvature.shape)}, the parameter {tuple(p.shape)}"
        )
    if factors_of(curvature) is None:
        curvature = written_out(curvature)
    return curvature if curvature.dtype == p.dtype else curvature.to(p.dtype)


def suspicious(slots: Sequence[Slot]) -> list[Slot]:
    """The slots that may hold an inf or a nan, or a curvature that is zero throughout; all others do not.

    Two numbers per slot find them, gᵀg and hᵀh. In all others the squares of g and h are finite, too.
    """
    tensors = [tensor for slot in slots for tensor in (slot.g, slot.h) if tensor is not None]
    numbers = _numbers([*map(_square, tensors)])
    if 0.0 not in numbers and math.isfinite(sum(numbers)):  # at a glance
        return []
    left = iter(numbers)
    seen = [(slot, next(left), 1.0 if slot.h is None else next(left)) for slot in slots]
    return [slot for slot, g, h in seen if h == 0.0 or not math.isfinite(g + h)]


def non_finite(suspects: Sequence[Slot]) -> list[str]:
    """The gradients and curvatures that hold an inf or a nan, in words. Warns of curvature that is zero throughout."""
    found, flat = [], []
    for slot in suspects:
        bad = [what for what, tensor in (("gradient", slot.g), ("curvature", slot.h)) if not _is_finite(tensor)]
        found += [f"the {what} of {name_of(*slot.place)}" for what in bad]
        if not bad and slot.h is not None and _any(slot.g) and not _any(slot.h) and not _any(slot.v):
            flat.append(name_of(*slot.place))
    if flat:
        warnings.warn(_ZERO_CURVATURE.format(names=", ".join(flat)), stacklevel=5)
    return found


def _square(x: Tensor) -> Tensor:
    """xᵀx"""
    factors = factors_of(x)
    if factors is not None:
        return _square(factors[0]) * _square(factors[1])
    if x.dtype in _WIDE and x.is_contiguous():
        x = x.view(-1)
        return torch.dot(x, x)
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum()  # half precision would overflow


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(tensor.isfinite().all())


def _any(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.any())


def _numbers(values: Sequence[Tensor]) -> list[float]:
    if all(value.is_cpu for value in values):
        return [value.item() for value in values]
    if len({(value.dtype, value.device) for value in values}) > 1:
        values = [value.to("cpu", torch.float64) for value in values]
    found: list[float] = torch.stack([*values]).tolist()  # one transfer for all of them
    return found
