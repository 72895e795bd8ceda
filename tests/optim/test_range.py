"""Curvature of any size that single precision can hold moves its entry as in double precision; so does an old state."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hesscale

from .small import assert_close
from .test_conventions import saved_and_loaded

FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "loop": {"fused": False},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True},
    "differentiable": {"differentiable": True},
}
SIZES = (1e38, 1e30, 1e20, 1.0, 1e-20, 1e-30, 1e-37)


def walk(dtype: torch.dtype, sizes: tuple[float, ...] = SIZES, **options: Any) -> Tensor:
    """Where entries of gradient and curvature of these sizes, the one after the other ten times smaller, come to."""
    found = torch.zeros(len(sizes), dtype=dtype)
    p = found if options.get("differentiable") else nn.Parameter(found)
    optimizer = hesscale.AdaHesScale([p], lr=0.01, betas=(0.9, 0.99), **{"eps": 0.0, **options})
    for step in range(4):
        p.grad = torch.tensor(sizes, dtype=torch.float64).div(2 + step).to(dtype)
        p.curvature = p.grad.detach().float() if dtype == torch.bfloat16 else p.grad.clone()  # type: ignore[attr-defined]
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options", [{}, {"bound": None}, {"eps_inside_root": True}, {"every": 2}, {"scale": "mean_abs"}], ids=str
)
def test_every_size_moves(form: str, options: dict[str, Any]) -> None:
    if form == "capturable" and "every" in options:
        pytest.skip("a captured step is the same each time")
    exact = walk(torch.float64, **FORMS[form], **options)
    assert (exact.abs() > 0.005).all()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        assert_close([walk(dtype, **FORMS[form], **options).double()], [exact], tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_and_with_a_trust_region(form: str) -> None:
    sizes = (1e30, 1e30)
    exact = walk(torch.float64, sizes, trust_region=1e20, **FORMS[form])
    assert_close([walk(torch.float32, sizes, trust_region=1e20, **FORMS[form]).double()], [exact], 1e-5)


def test_a_huge_curvature_is_forgotten_as_any_other() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = hesscale.AdaHesScale([p], lr=0.01, betas=(0.9, 0.5))
    for step in range(250):
        p.grad, p.curvature = torch.ones(1), torch.full((1,), 1e30 if step == 0 else 1.0)
        optimizer.step()
    assert optimizer.state[p]["mean_curvature"].item() == pytest.approx(1.0)


def old(optimizer: Any) -> Any:
    """The state as it was once: squares in place of their root, and step as a number."""
    state = optimizer.state_dict()
    scales = {key: group["scale"] for group in state["param_groups"] for key in group["params"]}
    for key, one in state["state"].items():
        v = one["mean_curvature"]
        kept = {"step": one["step"].item(), "refreshes": one["refreshes"], "exp_avg": one["exp_avg"]}
        state["state"][key] = {**kept, "exp_curvature": v.square() if scales[key] == "rms" else v}
    return state


def trained(dtype: torch.dtype = torch.float32) -> tuple[list[Any], Any]:
    a, b = params = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    optimizer = hesscale.AdaHesScale([{"params": [a]}, {"params": [b], "scale": "mean"}], lr=0.01)
    advance(params, optimizer)
    return params, optimizer


def advance(params: list[Any], optimizer: Any) -> None:
    for p in params:
        p.grad, p.curvature = torch.full_like(p, 0.5), torch.tensor([3.0, -2.0, 1e-3])
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_old_state_is_taken_over(dtype: torch.dtype) -> None:
    ours, optimizer = trained(dtype)
    saved = saved_and_loaded(old(optimizer))
    theirs = copy.deepcopy(ours)
    other = hesscale.AdaHesScale([{"params": [theirs[0]]}, {"params": [theirs[1]]}])
    other.load_state_dict(saved)
    assert all("exp_curvature" not in state for state in other.state.values())
    advance(ours, optimizer)
    advance(theirs, other)
    torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in theirs])
    expected = [optimizer.state[p]["mean_curvature"] for p in ours]
    assert_close([other.state[p]["mean_curvature"] for p in theirs], expected, 1e-6)


def test_an_old_pickle_is_taken_over() -> None:
    params, optimizer = trained()
    expected = [optimizer.state[p]["mean_curvature"].clone() for p in params]
    state = optimizer.__getstate__()
    for p, one in zip(params, old(optimizer)["state"].values(), strict=True):
        state["state"][p] = one
    again = pickle.loads(pickle.dumps(Holder(state))).optimizer()
    assert_close([one["mean_curvature"] for one in again.state.values()], expected, 1e-6)
    advance([p for group in again.param_groups for p in group["params"]], again)


class Holder:
    """What a pickle of an optimizer holds."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def optimizer(self) -> Any:
        found = hesscale.AdaHesScale.__new__(hesscale.AdaHesScale)
        found.__setstate__(self.state)
        return found


def test_an_entry_that_stood_still_for_good_moves_again() -> None:
    (p, q), optimizer = trained()
    p.grad = q.grad = None
    state = old(optimizer)
    state["state"][0]["exp_curvature"][0] = torch.inf
    optimizer.load_state_dict(state)
    before = p.detach().clone()
    for _ in range(5):
        p.grad, p.curvature = torch.full_like(p, 1e19), torch.ones(3)
        optimizer.step()
    assert (p != before).all()


def test_step_may_be_a_number_in_what_is_loaded() -> None:
    params, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    for one in state["state"].values():
        one["step"] = one["step"].item()
    optimizer.load_state_dict(state)
    advance(params, optimizer)
    assert all(optimizer.state[p]["step"].item() == 2.0 for p in params)
