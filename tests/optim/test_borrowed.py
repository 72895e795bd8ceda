"""The default step on the CPU, by torch's own fused Adam: equal to the loop, to which it leaves the rest."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hesscale
from hesscale.optim import borrowed
from hesscale.optim.updates import Slot

from ..test_price import Counting
from .small import TOLERANCES, assert_close, assert_same, made, moved_by, random

SHAPES = [(3, 4), (1,), (7,), (513, 515), (2, borrowed.PIECE), (31, 33)]  # smaller and larger than a piece

Options = dict[str, Any]


def feed(params: list[Any], step: int = 0) -> None:
    for index, p in enumerate(params):
        p.grad = random(*p.shape, seed=1000 + 100 * step + index).to(p.dtype)
        p.curvature = random(*p.shape, seed=2000 + 100 * step + index).to(p.dtype)


def walk(params: list[Any], options: Options, steps: int = 3) -> list[Tensor]:
    return moved_by(params, feed, options, steps)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors in each call of torch's kernel."""
    found: list[int] = []
    original = borrowed._move

    def move(slots: list[Slot]) -> None:
        found.append(len(slots))
        original(slots)

    monkeypatch.setattr(borrowed, "_move", move)
    return found


@pytest.fixture(autouse=True)
def minus_infinity_stays() -> Any:
    yield
    for dtype in TOLERANCES:
        assert torch.all(borrowed._minus_infinities(dtype) == -math.inf)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.3},
        {"maximize": True},
        {"every": 2},
        {"every": 2, "weight_decay": 0.3},
        {"lr": 0.0, "weight_decay": 0.3},
        {"betas": (0.0, 0.5), "eps": 0.1},
    ],
    ids=str,
)
def test_it_equals_the_loop(options: Options, dtype: torch.dtype, moved: list[int]) -> None:
    options = {"lr": 0.01, **options}
    results = []
    for foreach in (None, False):
        params = made(SHAPES, dtype)
        optimizer = hesscale.AdaHesScale(params, foreach=foreach, **options)
        for step in range(5):
            feed(params, step)
            optimizer.step()
        results.append([*(p.detach() for p in params), *(optimizer.state[p]["exp_curvature"] for p in params)])
    assert moved
    assert_close(*results, tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize(
    "options", [{"betas": (0.9, 0.0)}, {"scale": "mean_abs"}, {"eps_inside_root": True}, {"foreach": False}], ids=str
)
def test_what_torch_cannot_do_is_left_to_the_loop(options: Options, moved: list[int]) -> None:
    expected = walk(made(SHAPES[:3]), {**options, "foreach": False})
    assert_same(walk(made(SHAPES[:3]), options), expected)
    assert not moved


def test_other_layouts_are_left_to_the_loop(moved: list[int]) -> None:
    results = []
    for foreach in (None, False):
        p = nn.Parameter(random(6, 5).mT)
        results.append(walk([p], {"foreach": foreach}))
    assert_same(*results)
    assert not moved


def test_groups_of_different_kinds_are_kept_apart(moved: list[int]) -> None:
    results = []
    for foreach in (None, False):
        params = [*made([(4, 5), (3,)]), *made([(6, 2), (5, 5)], torch.float64), nn.Parameter(random(4, 3).float().mT)]
        groups: list[Options] = [{"params": [p], "every": 1 + i % 3, "lr": 0.01 * i} for i, p in enumerate(params)]
        optimizer = hesscale.AdaHesScale(groups, foreach=foreach)
        for step in range(7):
            for p in params:
                p.grad = random(*p.shape, seed=step).to(p)
                p.curvature = random(*p.shape, seed=step + 20).to(p)  # type: ignore[attr-defined]
            optimizer.step()
        results.append([p.detach() for p in params])
    assert_close(*results, tolerance=1e-6)
    assert sum(moved) == 7 * 4


def test_entries_without_curvature_stay_and_the_rest_moves(moved: list[int]) -> None:
    flat, curved = made([(4, 5), (2, 3)])
    before = flat.detach().clone()
    optimizer = hesscale.AdaHesScale([flat, curved], lr=0.1)
    feed([flat, curved])
    flat.curvature[1] = 0.0  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(flat[1], before[1])
    assert torch.all(flat[[0, 2, 3]] != before[[0, 2, 3]])
    assert moved == [1]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_gradient_whose_square_overflows_is_left_to_the_loop(dtype: torch.dtype, moved: list[int]) -> None:
    huge = torch.finfo(dtype).max ** 0.75
    results = []
    for foreach in (None, False):
        params = made([(4, 5), (2, 3)], dtype)
        feed(params)
        assert params[0].grad is not None
        params[0].grad[2, 3] = huge
        hesscale.AdaHesScale(params, lr=0.1, foreach=foreach).step()
        results.append([p.detach() for p in params])
    assert_same(*results)
    assert moved == [1]


def test_small_parameters_share_a_call_and_nothing_large_is_allocated(moved: list[int]) -> None:
    params = made([(100, 90), (90,), (300, 300), (300,)])
    optimizer = hesscale.AdaHesScale(params, lr=0.01)
    feed(params)
    optimizer.step()
    feed(params)
    moved.clear()
    with Counting() as counting:
        optimizer.step()
    assert moved == [4]
    assert counting.allocations.total() == 0


def looks(optimizer: hesscale.AdaHesScale, params: list[Any], step: int = 0) -> int:
    """How often the next step looks for zeros in an average."""
    feed(params, step)
    with Counting() as counting:
        optimizer.step()
    return counting.calls["amin.default"]


def test_zeros_are_looked_for_once() -> None:
    params = made([(3, 4), (7,)])
    optimizer = hesscale.AdaHesScale(params, lr=0.01, every=2)
    assert [looks(optimizer, params, step) for step in range(5)] == [2, 0, 0, 0, 0]


def test_zeros_are_looked_for_again_where_others_wrote_or_the_model_moved() -> None:
    params = made([(3, 4), (7,)])
    optimizer = hesscale.AdaHesScale(params, lr=0.01)
    assert looks(optimizer, params) == 2
    average = optimizer.state[params[0]]["exp_curvature"]
    average[1] = 0.0
    assert looks(optimizer, params) == 1
    optimizer.state[params[1]]["exp_curvature"] = optimizer.state[params[1]]["exp_curvature"].clone()
    assert looks(optimizer, params) == 1
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert looks(optimizer, params) == 2
    assert looks(optimizer, params) == 0


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_an_average_that_others_set_to_zero_holds_its_entries(dtype: torch.dtype) -> None:
    params = made([(3, 4), (7,)], dtype)
    optimizer = hesscale.AdaHesScale(params, lr=0.01)
    looks(optimizer, params)
    optimizer.state[params[0]]["exp_curvature"][1] = 0.0
    before = params[0].detach().clone()
    feed(params)
    params[0].curvature[1] = 0.0
    optimizer.step()
    assert torch.equal(params[0][1], before[1])
    assert torch.all(params[0][[0, 2]] != before[[0, 2]])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_an_average_that_fades_away_is_seen_to_reach_zero(dtype: torch.dtype) -> None:
    results = []
    for foreach in (None, False):
        (p,) = made([(4, 5)], dtype)
        optimizer = hesscale.AdaHesScale([p], lr=1e-3, betas=(0.9, 1e-4), foreach=foreach)
        for step in range(100):
            feed([p], step)
            if step:
                p.curvature[2:] = 0.0
            optimizer.step()
        assert not optimizer.state[p]["exp_curvature"][2:].any()
        results.append([p.detach()])
    assert_close(*results, tolerance=TOLERANCES[dtype])


def test_a_step_that_was_interrupted_is_not_taken_for_one_that_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    (p,) = made([(4, 5)])
    optimizer = hesscale.AdaHesScale([p], lr=0.01)

    def step() -> None:
        feed([p])
        p.curvature[2] = 0.0
        optimizer.step()

    step()
    before = p.detach().clone()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(borrowed, "_update", lambda slots: (_ for _ in ()).throw(KeyboardInterrupt))
        step()
    for _ in range(2):
        step()
    assert torch.equal(p[2], before[2])


def test_a_number_that_is_none_hides_no_zeros() -> None:
    (p,) = made([(4, 5)])
    optimizer = hesscale.AdaHesScale([p], lr=0.01)
    feed([p])
    p.curvature[2] = 0.0
    optimizer.step()
    optimizer.state[p]["exp_curvature"][0, 0] = math.nan
    before = p.detach().clone()
    for _ in range(3):
        feed([p])
        p.curvature[2] = 0.0
        optimizer.step()
    assert torch.equal(p[2], before[2])


def test_averages_that_were_loaded_are_looked_at() -> None:
    """Even where they lie where others lay, and have as many versions."""
    params = made([(300, 300)])
    optimizer = hesscale.AdaHesScale(params, lr=0.01, every=2)
    looks(optimizer, params)
    alive = copy.deepcopy(optimizer.state_dict())
    dead = copy.deepcopy(alive)
    dead["state"][0]["exp_curvature"][2] = 0.0
    for state in (alive, dead, alive, dead):
        optimizer.state.clear()
        optimizer.load_state_dict(copy.deepcopy(state))
        feed(params)
        before = params[0].detach().clone()
        params[0].curvature[2] = 0.0
        optimizer.step()
        assert torch.equal(params[0][2], before[2]) == (state is dead)
