"""Weights and their masks, as ``torch.nn.utils.prune`` keeps them: weight_orig and weight_mask in place of weight.

A weight is called here what it was called before it was pruned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

_ORIG, _MASK = "_orig", "_mask"


@dataclass(frozen=True)
class Place:
    """Where a weight is: a module's attribute."""

    name: str  # in the whole model
    module: nn.Module
    own: str  # in its module

    @property
    def masked(self) -> bool:
        """Whether it was pruned before."""
        return hasattr(self.module, self.own + _MASK)

    @property
    def today(self) -> str:
        """What ``model.named_parameters()`` calls it now."""
        return self.name + _ORIG if self.masked else self.name

    @property
    def parameter(self) -> Tensor:
        """What is trained: with its former values where the mask is zero."""
        found: Tensor = getattr(self.module, self.own + _ORIG if self.masked else self.own)
        return found

    @property
    def mask(self) -> Tensor:
        """Ones where nothing was removed yet."""
        return getattr(self.module, self.own + _MASK) if self.masked else torch.ones_like(self.parameter)

    def keep(self, mask: Tensor) -> None:
        """Masks the weight with this as well."""
        with torch.no_grad():  # what torch keeps beside weight_orig would else have a graph, which nobody can copy
            prune.custom_from_mask(self.module, self.own, mask.to(self.parameter.dtype))


def places(model: nn.Module, asked: Sequence[str] | None) -> dict[str, Place]:
    """By name, those asked for, by their names of today or before; all matrices, filters and the like if None."""
    known = {place.name: place for place in (_place(model, name) for name, _ in model.named_parameters())}
    if asked is None:
        chosen = [name for name, place in known.items() if place.parameter.requires_grad and place.parameter.dim() > 1]
        if not chosen:
            raise ValueError(
                "the model has no weight of two or more dimensions that requires grad: name some (params=)"
            )
        return {name: known[name] for name in chosen}
    by_today = {place.today: place for place in known.values()}
    unknown = [name for name in asked if name not in known and name not in by_today]
    if unknown:
        raise ValueError(f"the model has no parameter {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
    found = [known.get(name) or by_today[name] for name in asked]
    return {place.name: place for place in found}


def _place(model: nn.Module, name: str) -> Place:
    holder, _, own = name.rpartition(".")
    module = model.get_submodule(holder)
    before = own.removesuffix(_ORIG)
    if own != before and hasattr(module, before + _MASK):
        return Place(name.removesuffix(_ORIG), module, before)
    return Place(name, module, own)


def alive(model: nn.Module, name: str) -> Tensor:
    """Ones where a parameter, by its name of today, reaches any module that uses it; zeros where all mask it."""
    asked = model.get_parameter(name)
    users = [other for other, p in model.named_parameters(remove_duplicate=False) if p is asked]
    return torch.stack([_place(model, user).mask.detach() for user in users]).amax(0)


def refuse_shared(model: nn.Module, chosen: Mapping[str, Place]) -> None:
    """A mask belongs to one module: a weight that several use would be masked in one of them only."""
    names: dict[int, dict[int, str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        # a module that is called twice has one mask, which serves both
        names.setdefault(id(p), {}).setdefault(id(_place(model, name).module), name)
    for place in chosen.values():
        users = names[id(place.parameter)].values()
        if len(users) > 1:
            raise ValueError(
                f"{' and '.join(users)} are one parameter, which a mask cannot follow: leave it out (params=)"
            )


def apply_masks(model: nn.Module, chosen: Mapping[str, Place], kept: Mapping[str, Tensor]) -> None:
    """Masks each weight with zeros and ones of its own."""
    for name, place in chosen.items():
        place.keep(kept[name])
    _refresh_attention(model)


def load_pruned(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads the ``state_dict`` of a pruned model into a model of the same kind, pruned or not."""
    for key in state:
        name = key.removesuffix(_MASK)
        if name != key and name + _ORIG in state and name in dict(model.named_parameters()):
            holder, _, own = name.rpartition(".")
            with torch.no_grad():
                prune.identity(model.get_submodule(holder), own)
    model.load_state_dict(state)
    with torch.no_grad():
        for module in model.modules():
            _apply(module, ())
    _refresh_attention(model)


def _refresh_attention(model: nn.Module) -> None:
    """``nn.MultiheadAttention`` reads out_proj.weight without calling out_proj, whose mask would never be applied."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and hasattr(module.out_proj, "weight" + _MASK):
            hooks = module._forward_pre_hooks.values()
            if _apply_out_proj not in hooks:
                module.register_forward_pre_hook(_apply_out_proj)


def _apply_out_proj(module: nn.Module, args: Any) -> None:
    _apply(module.get_submodule("out_proj"), args)


def _apply(module: nn.Module, args: Any) -> None:
    """Makes weight = weight_orig · weight_mask, as torch does before the module's forward pass."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, prune.BasePruningMethod):
            hook(module, args)
