"""Weights and their masks, as ``torch.nn.utils.prune`` keeps them: weight_orig and weight_mask in place of weight.

A weight is called here what it was called before it was pruned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_ORIG, _MASK = "_orig", "_mask"
_NORMS = (SpectralNorm, WeightNorm)  # hooks that came before parametrizations


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
    def parametrized(self) -> bool:
        """Whether the layer computes with a function of it, as with weight normalization."""
        older = any(self.own.startswith(f"{name}_") for name in _made_by_norms(self.module))
        return older or isinstance(self.module, ParametrizationList)

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

    @property
    def weight(self) -> Tensor:
        """What the layer computes with: zero where it was removed."""
        return self.parameter.detach() * self.mask if self.masked else self.parameter.detach()

    def keep(self, mask: Tensor) -> None:
        """Masks the weight with this as well."""
        with torch.no_grad():  # what torch keeps beside weight_orig would else have a graph, which nobody can copy
            prune.custom_from_mask(self.module, self.own, mask.to(self.parameter.dtype))


def places(model: nn.Module, asked: Sequence[str] | None) -> dict[str, Place]:
    """By name, those asked for, by their names of today or before; all matrices, filters and the like if None.

    Not those of parametrized weights: zeros there are not zeros of the weight, and a direction of zeros has no norm.
    """
    known = {place.name: place for place in all_places(model)}
    if asked is None:
        chosen = {name: place for name, place in known.items() if _is_matrix(place.parameter)}
        chosen = {name: place for name, place in chosen.items() if not place.parametrized}
        if not chosen:
            raise ValueError(
                "the model has no weight of two or more dimensions that requires grad and is not parametrized: name "
                "some (params=)"
            )
        return chosen
    by_today = {place.today: place for place in known.values()}
    unknown = [name for name in asked if name not in known and name not in by_today]
    found = [known.get(name) or by_today[name] for name in asked if name not in unknown]
    parametrized = [*(name for name in unknown if _is_made(model, name)), *(p.name for p in found if p.parametrized)]
    if parametrized:
        raise ValueError(
            f"{', '.join(parametrized)}: a parametrized weight cannot be pruned; leave it out, or make the "
            "parametrization final first (torch.nn.utils.parametrize.remove_parametrizations)"
        )
    if unknown:
        raise ValueError(f"the model has no parameter {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
    return {place.name: place for place in found}


def _is_matrix(p: Tensor) -> bool:
    return p.requires_grad and p.dim() > 1


def _is_made(model: nn.Module, name: str) -> bool:
    """Whether this is a weight that its module computes from parameters."""
    holder, _, own = name.rpartition(".")
    module = dict(model.named_modules()).get(holder)
    return module is not None and (is_parametrized(module, own) or own in _made_by_norms(module))


def _made_by_norms(module: nn.Module) -> list[str]:
    return [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, _NORMS)]


def all_places(model: nn.Module) -> list[Place]:
    """One for each parameter, in the model's order."""
    return [_place(model, name) for name, _ in model.named_parameters()]


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


@contextmanager
def noting_calls(model: nn.Module, chosen: Mapping[str, Place]) -> Iterator[set[str]]:
    """The names of those weights, filled in as passes call their modules: it is then that torch applies a mask."""
    attention = {id(m.out_proj): m for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    called: set[str] = set()
    handles = []
    for name, place in chosen.items():
        caller = attention.get(id(place.module), place.module)
        handles.append(caller.register_forward_pre_hook(lambda module, args, name=name: called.add(name)))
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def refuse_uncalled(chosen: Mapping[str, Place], called: Collection[str]) -> None:
    """The mask of a weight that is read without its module being called would be applied once and never again."""
    missed = [name for name in chosen if name not in called]
    if missed:
        raise ValueError(
            f"{', '.join(missed[:3])}{' and others' if missed[3:] else ''}: no pass called the module it belongs to, "
            "and only there is a mask applied: leave it out (params=), or have the model call the module"
        )


def apply_masks(model: nn.Module, chosen: Mapping[str, Place], kept: Mapping[str, Tensor]) -> None:
    """Masks each weight with zeros and ones of its own."""
    for name, place in chosen.items():
        place.keep(kept[name])
    _refresh_attention(model)


def load_pruned(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads the ``state_dict`` of a pruned model into a model of the same kind, pruned or not; all of it or nothing.

    >>> model = nn.Linear(2, 1)
    >>> _ = nn.utils.prune.l1_unstructured(model, "weight", amount=1)
    >>> hesscale.applications.pruning.load_pruned(again := nn.Linear(2, 1), model.state_dict())
    >>> torch.equal(again.weight, model.weight)
    True
    """
    dense = [place for place in all_places(model) if not place.masked]
    to_mask = [place for place in dense if {place.name + _ORIG, place.name + _MASK} <= state.keys()]
    with _all_or_nothing(model, to_mask):
        for place in to_mask:
            with torch.no_grad():
                prune.identity(place.module, place.own)
        model.load_state_dict(state)
    with torch.no_grad():
        for module in model.modules():
            _apply(module, ())
    _refresh_attention(model)


@contextmanager
def _all_or_nothing(model: nn.Module, masked: Sequence[Place]) -> Iterator[None]:
    """On an error these have no mask any more, and every tensor has its former values: torch loads what it can."""
    with torch.no_grad():
        values = [(tensor, tensor.clone()) for tensor in (*model.parameters(), *model.buffers())]
    parameters = [(place.module, dict(place.module._parameters)) for place in masked]
    try:
        yield
    except BaseException:
        for place in masked:
            if place.masked:
                prune.remove(place.module, place.own)
        for module, own in parameters:
            module._parameters.clear()  # in their former order
            module._parameters.update(own)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        raise


def _refresh_attention(model: nn.Module) -> None:
    """``nn.MultiheadAttention`` reads out_proj.weight without calling out_proj, whose mask would never be applied."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and prune.is_pruned(module.out_proj):
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
