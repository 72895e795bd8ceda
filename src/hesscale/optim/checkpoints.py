"""Loading an optimizer's state: averages keep their digits; torch's Adam and AdamW, and our past, are taken over."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..graph import LOW_PRECISION

_ADOPTED = (
    "this is the state of another Adam: exp_avg and step are taken over with all options of its groups, the average of "
    "curvature begins afresh"
)
_OTHER = "this is the state of an optimizer that keeps {names}: only that of Adam and AdamW can be taken over"
_AVERAGES = ("exp_avg", "mean_curvature")


@contextmanager
def adopted(optimizer: Optimizer) -> Iterator[None]:
    """Within it ``load_state_dict`` takes the state of Adam and AdamW, and casts no average to half precision.

    Both are done by hooks that come after all others of the user.
    """
    seen: list[Mapping[str, Any]] = []

    def before(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(_translated(state_dict))
        return dict(seen[0])

    def after(_: Optimizer) -> None:
        _restore(optimizer, seen[0])

    handles = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _translated(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same, with the state of another Adam in our terms; ValueError if it is of another optimizer."""
    scales = {key: group.get("scale") for group in state_dict["param_groups"] for key in group["params"]}
    state = {key: today(one, scales[key]) if key in scales else one for key, one in state_dict["state"].items()}
    foreign = {key: one for key, one in state.items() if one and "mean_curvature" not in one}
    for one in foreign.values():
        if not {"step", "exp_avg", "exp_avg_sq"} <= one.keys():
            raise ValueError(_OTHER.format(names=", ".join(one)))
    if foreign:
        warnings.warn(_ADOPTED, stacklevel=7)
    return {**state_dict, "state": {**state, **{key: _from_adam(one) for key, one in foreign.items()}}}


def today(state: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """The state of a parameter as it is kept today: a root in place of a square, the largest one where that was inf."""
    found = dict(state)
    if "exp_curvature" in found:
        v: Tensor = found.pop("exp_curvature")
        found["mean_curvature"] = v.clamp(max=torch.finfo(v.dtype).max).sqrt() if scale == "rms" else v
    return found


def _from_adam(state: Mapping[str, Any]) -> dict[str, Any]:
    average: Tensor = state["exp_avg"]
    return {
        "step": state["step"],
        "refreshes": 0,
        "exp_avg": average,
        "mean_curvature": torch.zeros_like(average),
    }


def _restore(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Averages of parameters in half precision once more, as they were saved: torch has cast them."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, key in zip(group["params"], saved["params"], strict=True):
            if p.dtype in LOW_PRECISION and key in state_dict["state"]:
                for name in _AVERAGES:
                    value = state_dict["state"][key][name]
                    optimizer.state[p][name] = value.detach().clone().to(device=p.device, dtype=torch.float32)
