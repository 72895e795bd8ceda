"""The update in C++: equal to the loop, on any number of threads, careful with memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hesscale
from hesscale.fast import native

from ..test_price import Counting
from .native_calls import calls as calls
from .native_calls import turned_on as turned_on
from .small import TOLERANCES, assert_close, assert_same, made, moved_by, network, parameters, random, train

SIZES = [1, 2, 7, 31, 33, 1000, 70001]


Options = dict[str, Any]


def feed(params: list[Any], step: int = 0) -> None:
    for index, p in enumerate(params):
        p.grad = torch.empty_like(p).copy_(random(*p.shape, seed=1000 + 100 * step + index))
        h = random(*p.shape, seed=2000 + 100 * step + index)
        p.curvature = torch.empty_like(p).copy_(h * (h < 2))  # here and there a zero
        p.curvature.view(-1)[3:5] = 0.0  # and here always


def walk(params: list[Any], options: Options, steps: int = 4) -> list[Tensor]:
    return moved_by(params, feed, options, steps)


def test_there_is_a_compiler_for_the_tests_below() -> None:
    assert native.library() is not None


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("common", [{}, {"weight_decay": 0.1}, {"every": 2}, {"trust_region": 1e-3}], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 0.1, "eps_inside_root": True}, {"scale": "mean_abs"}, {"scale": "mean", "eps": 0.1}],
    ids=str,
)
def test_it_equals_the_loop(
    options: Options, common: Options, maximize: bool, dtype: torch.dtype, calls: list[int]
) -> None:
    options = {**options, **common, "maximize": maximize}
    shapes = [(size,) for size in SIZES]
    ours = walk(made(shapes, dtype), options)
    assert calls == [len(SIZES)] * 4
    assert_close(ours, walk(made(shapes, dtype), {**options, "foreach": False}), TOLERANCES[dtype])
    assert_same(ours, walk(made(shapes, dtype), {**options, "fused": True}))


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 4),
        ({"fused": True}, 4),
        ({"fused": False}, 0),
        ({"foreach": True}, 0),
        ({"foreach": False}, 0),
        ({"capturable": True}, 0),
    ],
    ids=str,
)
def test_who_asks_for_what(options: Options, count: int, calls: list[int]) -> None:
    walk(made([(5,), (6, 7)]), options)
    assert len(calls) == count


def test_entries_without_curvature_stay() -> None:
    (p,) = params = made([(100,)])
    before = p.detach().clone()
    walk(params, {})
    assert torch.equal(p[3:5], before[3:5])
    assert (p != before).sum() == 98


@pytest.mark.parametrize("every", [1, 3])
def test_any_number_of_threads_makes_the_same_steps(every: int, calls: list[int]) -> None:
    shapes: list[Any] = [(3,), (300, 401), (70001,), (5000,), (31,), (), (256, 256)]
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(walk(made(shapes), {"every": every}))
    finally:
        torch.set_num_threads(threads)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    assert len(calls) == 12


def test_layouts(calls: list[int]) -> None:
    """Entries in the same order are all it asks for; others do the rest."""
    images = random(4, 6, 5, 5)
    for make, mixed, native_calls in (
        (lambda x: x.clone(), False, 4),
        (lambda x: x.to(memory_format=torch.channels_last), False, 4),
        (lambda x: x.to(memory_format=torch.channels_last), True, 0),
        (lambda x: x.clone().transpose(0, 1), False, 0),
        (lambda x: x.repeat(1, 1, 1, 2)[..., ::2], False, 0),
        (lambda x: x[:1, :1, :1].clone().expand(1, 1, 1, 5), False, 4),
    ):
        found = []
        for options in ({"fused": True}, {"foreach": False}):
            p = nn.Parameter(make(images))
            optimizer = hesscale.AdaHesScale([p], lr=0.01, **options)
            for step in range(4):
                p.grad, p.curvature = (torch.empty_like(p).copy_(random(*p.shape, seed=step + i)) for i in (10, 20))
                p.curvature = p.curvature.contiguous() if mixed else p.curvature
                optimizer.step()
            found.append(p.detach())
        assert_close([found[0]], [found[1]], 1e-13)
        assert len(calls) == native_calls
        calls.clear()


def test_it_takes_no_tensor_that_it_could_misread() -> None:
    class Special(Tensor):
        pass

    def fits(**others: Any) -> bool:
        usual = {name: torch.ones(4, 3) for name in ("p", "g", "h", "m", "v")}
        return native.row(**{**usual, **others}, scale=0, numbers=[1.0] * 7) is not None

    assert fits()
    assert fits(h=None)
    for name in ("p", "g", "h", "m", "v"):
        for other in (
            torch.ones(4, 3, dtype=torch.float64),
            torch.ones(4, 4),
            torch.ones(3, 4),
            torch.ones(12),
            torch.ones(1, 3).expand(4, 3),
            torch.ones(3, 4).t(),
            torch.ones(4, 3, device="meta"),
            torch.ones(4, 3).as_subclass(Special),
            torch._efficientzerotensor((4, 3)),
            torch._neg_view(torch.ones(4, 3)),
        ):
            assert not fits(**{name: other})
    assert not fits(h=torch.ones(4, 3).to_sparse())
    assert not fits(**{name: torch.ones(4, 3, dtype=torch.bfloat16) for name in ("p", "g", "h", "m", "v")})
    assert not fits(**{name: torch.ones(0, 3) for name in ("p", "g", "h", "m", "v")})


def test_memory_that_is_shared_is_left_to_the_loop(calls: list[int]) -> None:
    def parts(kind: str) -> list[nn.Parameter]:
        memory = random(12)
        if kind == "parameters":
            return [nn.Parameter(memory[:8]), nn.Parameter(memory[4:])]
        return [nn.Parameter(memory[:6]), nn.Parameter(memory[6:])]

    for kind, expected in (("parameters", 0), ("apart", 3), ("gradient and curvature", 3), ("gradient and p", 0)):
        found = []
        for foreach in (None, False):
            params = parts(kind)
            optimizer = hesscale.AdaHesScale(params, lr=0.01, foreach=foreach)
            for step in range(3):
                feed(params, step)
                if kind == "gradient and curvature":
                    params[0].curvature = params[0].grad
                if kind == "gradient and p":
                    params[0].grad = params[0].detach()
                optimizer.step()
            found.append([p.detach() for p in params])
        assert_close(*found, 1e-13)
        assert len(calls) == expected, kind
        calls.clear()


def test_averages_made_in_inference_mode_are_left_to_the_loop(calls: list[int]) -> None:
    found = []
    for foreach in (None, False):
        params = made([(5,), (6,)])
        optimizer = hesscale.AdaHesScale(params, foreach=foreach)
        for step in range(2):
            feed(params, step)
            with torch.inference_mode():
                optimizer.step()
        found.append([p.detach() for p in params])
    assert_same(*found)
    assert not calls


def test_dtypes_share_a_call(calls: list[int]) -> None:
    def mixed() -> list[nn.Parameter]:
        kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        return [nn.Parameter(random(40, seed=seed).to(dtype)) for seed, dtype in enumerate(kinds)]

    ours, theirs = walk(mixed(), {}, 1), walk(mixed(), {"foreach": True}, 1)
    assert calls == [4]
    assert_close(ours, theirs, 1e-6)


def test_groups_with_their_own_options_share_a_call(calls: list[int]) -> None:
    found = []
    for foreach in (None, False):
        a, b, c = params = made([(9,), (50, 3), (6,)])
        groups = [{"params": [a], "lr": 0.1}, {"params": [b], "weight_decay": 0.5, "maximize": True}, {"params": [c]}]
        optimizer = hesscale.AdaHesScale(groups, foreach=foreach)
        for step in range(3):
            feed(params, step)
            c.grad = None if step == 1 else c.grad  # of another age
            optimizer.step()
        found.append([p.detach() for p in params])
    assert calls == [3, 2, 3]
    assert_close(*found, 1e-6)


def test_empty_parameters() -> None:
    for options in ({}, {"foreach": False}, {"foreach": True}):
        params = made([(0,), (5,), (3, 0)])
        optimizer = hesscale.AdaHesScale(params, **options)
        for p in params:
            p.grad, p.curvature = torch.ones_like(p), torch.ones_like(p)
        optimizer.step()
        assert [optimizer.state[p]["step"].item() for p in params] == [1.0] * 3
        assert (params[1] != made([(0,), (5,)])[1]).all()


def test_a_saved_tensor_that_a_step_changed_is_noticed() -> None:
    p, other = made([(5,), (5,)])
    optimizer = hesscale.AdaHesScale([p])
    loss = (p * other).sum()
    feed([p])
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    versions = [tensor._version for tensor in (p, *(optimizer.state[p][key] for key in ("exp_avg", "mean_curvature")))]
    assert versions == [1, 1, 1]


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_one_bad_entry_anywhere_and_nothing_is_changed(dtype: torch.dtype, value: float) -> None:
    params = made([(7,), (4096 * 2 + 3,), (70001,)], dtype)
    optimizer = hesscale.AdaHesScale(params)
    feed(params)
    optimizer.step()
    before = [x.clone() for p in params for x in (p.detach(), *optimizer.state[p].values()) if isinstance(x, Tensor)]
    for what in ("gradient", "curvature"):
        for index, entry in ((2, -1), (2, 40000), (1, 0), (1, -1), (0, 2)):
            feed(params)
            (params[index].grad if what == "gradient" else params[index].curvature)[entry] = value
            with pytest.raises(RuntimeError) as caught:
                optimizer.step()
            shape = tuple(params[index].shape)
            assert str(caught.value) == (
                f"the {what} of parameter {index} of its group, shape {shape} is not finite; nothing was changed"
            )
            after = [x for p in params for x in (p.detach(), *optimizer.state[p].values()) if isinstance(x, Tensor)]
            assert_same(after, before)


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=str)
def test_the_largest_and_smallest_numbers_are_finite_and_not_zero(options: Options) -> None:
    for dtype in TOLERANCES:
        limits = torch.finfo(dtype)
        (p,) = params = made([(9,)], dtype)
        for value in (limits.max, limits.min, limits.smallest_normal, 1e-40 if dtype == torch.float32 else 5e-324):
            p.grad, p.curvature = torch.full_like(p, value), torch.full_like(p, value)
            hesscale.AdaHesScale(params, **options).step()  # a warning would be an error


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=str)
def test_zero_curvature_gets_its_warning(options: Options) -> None:
    (a, b) = params = made([(50,), (60,)])
    feed(params)
    b.curvature = torch.full_like(b, -0.0)
    before = b.detach().clone()
    optimizer = hesscale.AdaHesScale([("a", a), ("b", b)], **options)
    with pytest.warns(UserWarning, match="curvature is zero everywhere in b,"):
        optimizer.step()
    assert torch.equal(b, before)


@pytest.mark.parametrize("count", [4, 40])
def test_a_step_is_one_call_and_allocates_nothing_large(count: int, calls: list[int]) -> None:
    params = made([(300, 300), (300,)] * (count // 2))
    optimizer = hesscale.AdaHesScale(params)
    for step in range(2):
        feed(params, step)
        with Counting() as counting:
            optimizer.step()
    assert calls == [count, count]
    assert counting.allocations.total() == 0
    operators = {name for name in counting.calls if not name.startswith("profiler")}
    # the steps taken so far are read and counted, nothing else
    assert operators == {"_local_scalar_dense.default", "_foreach_add_.Scalar"}


def test_data_may_be_replaced_between_steps() -> None:
    found = []
    for options in ({}, {"foreach": False}):
        model = network()
        optimizer = hesscale.AdaHesScale(model.parameters(), **options)
        train(model, optimizer, range(2))
        for p in model.parameters():
            p.data = p.data.clone() * 0.5
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, range(2, 4))
        model.float()
        optimizer.load_state_dict(optimizer.state_dict())
        model.double()
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, range(4, 6))
        found.append(parameters(model))
    assert_close(*found, 1e-6)
