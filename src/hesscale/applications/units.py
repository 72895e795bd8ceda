"""What is removed as a whole: neurons, filters, attention heads, as numbers of the group each weight belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .masks import Place

Groups = Mapping[str, Tensor]
"""By parameter name, the number of the group of every entry: whole numbers from 0, of a shape that broadcasts to the
parameter's. Entries of several parameters may be of one group."""

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def neurons(model: nn.Module, *, without: Sequence[str] = ()) -> dict[str, Tensor]:
    """A group per output of every linear layer and per filter of every convolution: its weights and its bias.

    ``without`` names modules to leave out, such as the last: its outputs are the model's. Outputs of layers inside
    ``nn.MultiheadAttention`` are not neurons: see ``heads``. Layers with a parametrized weight are left out.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> hesscale.applications.pruning.neurons(model, without=["2"])["0.bias"]  # three groups, by number
    tensor([0, 1, 2])
    """
    inside = {id(part) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for part in m.modules()}
    found: dict[str, Tensor] = {}
    count = 0
    for name, module in model.named_modules():
        if name in without or id(module) in inside or not isinstance(module, _LAYERS) or not _has(module, "weight"):
            continue
        weight = _of(module, "weight")
        if isinstance(module, _TRANSPOSED) and module.groups > 1:
            raise ValueError(f"{name} is a transposed convolution in groups, whose filters are not rows: leave it out")
        dim = 1 if isinstance(module, _TRANSPOSED) else 0
        numbers = torch.arange(count, count := count + weight.shape[dim])
        prefix = f"{name}." if name else ""
        found[f"{prefix}weight"] = numbers.view(*(-1 if d == dim else 1 for d in range(weight.dim())))
        if _has(module, "bias"):
            found[f"{prefix}bias"] = numbers
    _refuse_none(found, "linear layer or convolution")
    return found


def heads(model: nn.Module) -> dict[str, Tensor]:
    """A group per head of every ``nn.MultiheadAttention``: its rows of q, k and v, and its columns of the output.

    >>> groups = hesscale.applications.pruning.heads(nn.MultiheadAttention(4, 2))
    >>> groups["out_proj.weight"]
    tensor([0, 0, 1, 1])
    """
    found: dict[str, Tensor] = {}
    count = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            numbers = torch.arange(count, count := count + module.num_heads).repeat_interleave(module.head_dim)
            prefix = f"{name}." if name else ""
            found.update({prefix + own: value for own, value in _of_attention(module, numbers)})
    _refuse_none(found, "nn.MultiheadAttention")
    return found


def _of_attention(module: nn.MultiheadAttention, numbers: Tensor) -> Iterator[tuple[str, Tensor]]:
    if module._qkv_same_embed_dim:
        yield "in_proj_weight", numbers.repeat(3).unsqueeze(1)
    else:
        for one in "qkv":
            yield f"{one}_proj_weight", numbers.unsqueeze(1)
    if module.in_proj_bias is not None:
        yield "in_proj_bias", numbers.repeat(3)
    yield "out_proj.weight", numbers


def _has(module: nn.Module, own: str) -> bool:
    """Whether it is a parameter, masked or not: neither missing nor parametrized."""
    return Place(own, module, own).masked or module._parameters.get(own) is not None


def _of(module: nn.Module, own: str) -> Tensor:
    found: Tensor = getattr(module, own)
    return found


def _refuse_none(found: Groups, what: str) -> None:
    if not found:
        raise ValueError(f"the model has no {what} to make groups of")


def numbered(chosen: Mapping[str, Place], groups: Groups | None) -> dict[str, Tensor]:
    """The group of every entry of the chosen weights, in full; without groups every entry is its own."""
    if groups is None:
        found, count = {}, 0
        for name, place in chosen.items():
            p = place.parameter
            found[name] = torch.arange(count, count := count + p.numel(), device=p.device).view(p.shape)
        return found
    return {name: _in_full(name, groups, place.parameter) for name, place in chosen.items()}


def _in_full(name: str, groups: Groups, p: Tensor) -> Tensor:
    if name not in groups:
        raise ValueError(f"groups has no entry for {name}: it belongs to another model")
    numbers = groups[name]
    if numbers.dtype.is_floating_point or numbers.dtype == torch.bool or int(numbers.min()) < 0:
        raise ValueError(f"groups must be whole numbers from 0; those of {name} are not")
    try:
        return numbers.to(p.device, torch.int64).expand(p.shape)
    except RuntimeError:
        raise ValueError(
            f"groups of shape {tuple(numbers.shape)} do not fit {name}, whose shape is {tuple(p.shape)}: they belong "
            "to another model"
        ) from None


def totals(values: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    """The sum over every group, in float64: many small terms of float32 would lose their digits."""
    count = 1 + max(int(number.max()) for number in numbers.values())
    device = next(iter(values.values())).device
    found = torch.zeros(count, dtype=torch.float64, device=device)
    for name, value in values.items():
        found.index_add_(0, numbers[name].flatten().to(device), value.detach().flatten().to(device, torch.float64))
    return found
