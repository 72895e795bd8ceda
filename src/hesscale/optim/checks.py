"""What an optimizer refuses, each in one sentence that says what to do; nothing has changed when it raises."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed import Optimizer, looks_separate, separate
from ..graph import LOW_PRECISION, wide
from .sources import Source
from .updates import SCALES, Place, Slot, is_zero

_NO_CURVATURE = (
    "there is no fresh curvature for {name}: call optimizer.backward(loss) or optimizer.attach(loss).backward() "
    "before step()"
)
_OTHER_METHOD = (
    "the curvature of {name} was written by {written!r}, but this optimizer expects {expected!r}: call "
    "optimizer.backward(loss), or optimizer.attach(loss) in place of hesscale.attach(loss)"
)
_ZERO_CURVATURE = (
    "curvature is zero everywhere in {names}, though the gradient is not: there is nothing to scale by, so it stays as "
    "it is. The loss is (piecewise) linear there, as absolute and hinge losses are: use another loss or optimizer"
)
_ALONE = (
    "{count} processes are training, and each would scale by its own curvature, so that copies of the model drift "
    "apart: call hesscale.distributed.synchronize(optimizer, model) once before training, or "
    "hesscale.distributed.separate(optimizer) if each trains a model of its own"
)


def refuse_bad_options(group: Mapping[str, Any], *, first: Mapping[str, Any]) -> None:
    """ValueError, with the value in it, unless the options of a group make sense, alone and beside the ``first``."""
    lr, betas, eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    every, bound, radius, scale = group["every"], group["bound"], group["trust_region"], group["scale"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr as a tensor must have one element, not shape {tuple(lr.shape)}")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, for the gradient's average and for that of curvature: {betas}")
    rows = (
        (lr >= 0.0, f"lr must not be negative: {lr}"),
        (eps >= 0.0, f"eps must not be negative: {eps}"),
        (all(0.0 <= beta < 1.0 for beta in betas), f"both betas must lie in [0, 1): {betas}"),
        (decay >= 0.0, f"weight_decay must not be negative: {decay}"),
        (isinstance(every, int) and every >= 1, f"every must be a whole number of steps, 1 or more: {every}"),
        (bound is None or bound > 0.0, f"bound must be positive, or None for the paper's algorithm: {bound}"),
        (radius is None or radius > 0.0, f"trust_region must be positive or None: {radius}"),
        (radius == first["trust_region"], "trust_region bounds the step of all groups together: it cannot differ"),
        (scale in SCALES, f"unknown scale {scale!r}: choose one of {', '.join(map(repr, SCALES))}"),
        (scale == "rms" or not group["eps_inside_root"], f"eps_inside_root needs a root: scale='rms', not {scale!r}"),
        (not (group["fused"] and group["foreach"]), "choose one of fused=True and foreach=True"),
        (
            not (group["differentiable"] and (group["fused"] or group["foreach"])),
            "differentiable=True runs as a loop: leave fused and foreach alone",
        ),
        (not group["capturable"] or every == 1, "a captured step is the same each time: capturable=True needs every=1"),
    )
    for is_fine, message in rows:
        if not is_fine:
            raise ValueError(message)


def refuse_alone(optimizer: Optimizer) -> None:
    """RuntimeError where several processes may train this model, and nothing gives it the others' curvature."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    count = torch.distributed.get_world_size()
    if count > 1 and not looks_separate(p for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError(_ALONE.format(count=count))
    if count > 1:
        separate(optimizer)  # found out once


def name_of(place: Place) -> str:
    """A parameter in words: its own name where the optimizer got ``named_parameters()``."""
    group, index = place
    if "param_names" in group:
        return str(group["param_names"][index])
    return f"parameter {index} of its group, shape {tuple(group['params'][index].shape)}"


def fresh_curvature(p: Tensor, g: Tensor, place: Place, *, is_due: bool, source: Source | None) -> Tensor | None:
    """``p.curvature`` in the dtype of averages, None unless it is due.

    A RuntimeError unless it is there and what the optimizer expects, and the gradient dense. Zeros where the gradient
    is zero too, which is what a parameter the loss never met has.
    """
    if p.dtype.is_complex:
        raise RuntimeError(f"{name_of(place)} is complex: hesscale's optimizers work on real parameters only")
    if g.layout != torch.strided:
        raise RuntimeError(f"{name_of(place)} has a sparse gradient: curvature is dense (nn.Embedding: sparse=False)")
    if not is_due:
        return None
    curvature: Tensor | None = getattr(p, "curvature", None)
    if curvature is None:
        if g.any():
            raise RuntimeError(_NO_CURVATURE.format(name=name_of(place)))
        return torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False)
    if curvature.shape != p.shape:
        raise RuntimeError(
            f"the curvature of {name_of(place)} has shape {tuple(curvature.shape)}, the parameter {tuple(p.shape)}"
        )
    written = getattr(curvature, "method", None)  # leaves.add notes it; what a user writes has none
    if source is not None and written not in (None, source.name):
        raise RuntimeError(_OTHER_METHOD.format(name=name_of(place), written=written, expected=source.name))
    is_wide = curvature.dtype is p.dtype and p.dtype not in LOW_PRECISION
    return curvature if is_wide else curvature.to(wide(p.dtype))


def non_finite(seen: Iterable[tuple[Slot, tuple[float, float]]]) -> str | None:
    """What holds an inf or a nan, in words. Warns of curvature that is zero throughout, and was so far."""
    bad: list[str] = []
    flat: list[str] = []
    for slot, (g, h) in seen:
        if not (math.isfinite(g) and math.isfinite(h)):
            bad.append(f"the {'curvature' if math.isfinite(g) else 'gradient'} of {name_of(slot.place)} is not finite")
        elif h == 0.0 and g > 0.0 and slot.h is not None and is_zero(slot.v):
            flat.append(name_of(slot.place))
    if flat:
        warnings.warn(_ZERO_CURVATURE.format(names=", ".join(flat)), stacklevel=6)
    if not bad:
        return None
    others = f"{len(bad) - 1} more parameter{'s' if len(bad) > 2 else ''}"
    return f"{bad[0]} (and {others})" if len(bad) > 1 else bad[0]
