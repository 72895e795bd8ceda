"""The bound of the step: it holds entry by entry in every form, has no scale of its own, and can be left away."""

import copy
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hesscale
from hesscale.optim import leaps

from .small import PRESETS, TOLERANCES, assert_close, assert_same, loss_of, made, network, parameters, random, train

FORMS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "native": {"fused": True},
    "capturable": {"capturable": True, "foreach": False},
    "capturable foreach": {"capturable": True, "foreach": True},
}
LEAPING = pytest.mark.filterwarnings("ignore:a step took the norm")
"""For what has no bound and leaps."""
SHAPES = [(7,), (33, 5), (), (4100,)]


def feed(params: list[Any], step: int, scale: float = 1.0) -> None:
    """Curvature from 1e-12 to 1, so that some entries are bounded and some are not; here and there it is zero."""
    for index, p in enumerate(params):
        g = random(*p.shape, seed=100 * step + index)
        h = 10 ** (-6 + 6 * random(*p.shape, seed=100 * step + index + 50).tanh())
        p.grad, p.curvature = (scale * x.to(p.dtype) for x in (g, h * (g < 2)))


def walk(options: dict[str, Any], *, steps: int = 4, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Any:
    """Parameters before and after each step."""
    params = made(SHAPES, dtype)
    optimizer = hesscale.AdaHesScale(params, **{"lr": 0.01, **options})
    found = [[p.detach().clone() for p in params]]
    for step in range(steps):
        feed(params, step, scale)
        optimizer.step()
        found.append([p.detach().clone() for p in params])
    return found


def moves(found: Any) -> Tensor:
    """All entries of all steps."""
    return torch.cat([(a - b).flatten() for x, y in itertools.pairwise(found) for a, b in zip(x, y, strict=True)])


@LEAPING
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": "mean_abs"}, {"eps": 1e-20, "eps_inside_root": True}, {"every": 3}, {"lr": torch.tensor(0.01)}],
    ids=str,
)
def test_no_entry_moves_further_and_some_move_so_far(form: str, options: dict[str, Any]) -> None:
    if "capturable" in form and "every" in options:
        pytest.skip("a captured step is the same each time")
    sizes = moves(walk({**options, **FORMS[form], "bound": 0.5})).abs() / 0.01
    assert sizes.max() <= 0.5 + 1e-6
    assert (sizes > 0.5 - 1e-6).float().mean() > 0.2
    assert ((sizes > 0) & (sizes < 0.49)).any()
    assert moves(walk({**options, **FORMS[form], "bound": None})).abs().max() > 1.0


@LEAPING
@pytest.mark.parametrize("form", FORMS)
def test_it_clips_what_the_paper_would_do(form: str) -> None:
    """In one step from the same state: the averages do not depend on the bound."""
    free, bounded = (moves(walk({**FORMS[form], "bound": bound}, steps=1)) for bound in (None, 0.5))
    torch.testing.assert_close(bounded, free.clamp(-0.005, 0.005), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "loop"])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "maximize": True}, {"trust_region": 1e-9}, {"scale": "mean"}], ids=str
)
def test_all_forms_are_equal(form: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {**options, "bound": 0.5}
    for a, b in zip(
        walk({**options, **FORMS[form]}, dtype=dtype), walk({**options, "foreach": False}, dtype=dtype), strict=True
    ):
        assert_close(a, b, 1e-12 if dtype is torch.float64 else 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_scale_of_the_loss_changes_nothing(form: str, dtype: torch.dtype) -> None:
    """Bit for bit where the scale is a power of two, and eps does not blur it."""
    options = {**FORMS[form], "bound": 0.5, "eps": 0.0}
    ours, scaled = (walk(options, scale=scale, dtype=dtype) for scale in (1.0, 1024.0))
    for a, b in zip(ours, scaled, strict=True):
        assert_same(a, b)
    assert_close(walk(options, scale=1000.0, dtype=dtype)[-1], ours[-1], 1e-5 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_a_loss_of_a_thousand_times_the_size_is_trained_the_same(preset: Any) -> None:
    found = []
    for scale in (1.0, 1000.0):
        model = network()
        optimizer = preset(model.parameters(), lr=0.01, bound=1.0, eps=0.0)
        for step in range(5):
            optimizer.zero_grad()
            torch.manual_seed(step)
            optimizer.backward(scale * loss_of(model, step))
            optimizer.step()
        found.append(parameters(model))
    assert_close(*found, 1e-9)


def as_before(params: list[Tensor], steps: int, *, weight_decay: float) -> None:
    """The loop of the time when there was no bound, operation by operation."""
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for step in range(steps):
        feed(params, step)
        with torch.no_grad():
            for p, mean, average in zip(params, m, v, strict=True):
                p.mul_(1 - 0.01 * weight_decay)
                mean.lerp_(p.grad, 1 - 0.9)  # type: ignore[arg-type]
                average.mul_(0.999**0.5).hypot_(p.curvature * (1 - 0.999) ** 0.5)  # type: ignore[attr-defined]
                c = torch.threshold_(average / (1 - 0.999 ** (step + 1)) ** 0.5, 0.0, math.inf).add_(1e-8)
                p.addcdiv_(mean, c, value=-0.01 / (1 - 0.9 ** (step + 1)))


@LEAPING
def test_without_a_bound_it_is_what_it_was_bit_for_bit() -> None:
    theirs: list[Any] = made(SHAPES, torch.float64)
    as_before(theirs, 4, weight_decay=0.1)
    for form in ("loop", "foreach"):
        assert_same(walk({**FORMS[form], "bound": None, "weight_decay": 0.1})[-1], [p.detach() for p in theirs])
    for form, options in FORMS.items():
        if form not in ("loop", "foreach"):
            assert_close(walk({**options, "bound": None, "weight_decay": 0.1})[-1], [p.detach() for p in theirs], 1e-9)
    # a bound out of reach rounds its own way in the loop, but not in C++, where it is one more minimum
    assert_same(*(walk({"fused": True, "bound": bound})[-1] for bound in (None, 1e30)))


@LEAPING
def test_groups_have_their_own_bound() -> None:
    for options in FORMS.values():
        a, b, c = params = made([(50,), (60,), (70,)])
        groups = [{"params": [a], "bound": 0.5}, {"params": [b], "bound": None}, {"params": [c]}]
        before = [p.detach().clone() for p in params]
        feed(params, 0)
        hesscale.AdaHesScale(groups, lr=0.01, bound=2.0, **options).step()
        tops = [float((p.detach() - q).abs().max()) for p, q in zip(params, before, strict=True)]
        assert tops[0] == pytest.approx(0.005, rel=1e-4)
        assert tops[1] > 1.0
        assert tops[2] == pytest.approx(0.02, rel=1e-4)


@pytest.mark.parametrize("options", [{"bound": 1.0}, {"trust_region": 1e-3}], ids=str)
def test_a_bounded_step_can_be_differentiated(options: dict[str, Any]) -> None:
    def stepped(p: Tensor, g: Tensor, h: Tensor, lr: Tensor) -> Tensor:
        p = p.clone()
        optimizer = hesscale.AdaHesScale([p], lr=lr, weight_decay=0.1, differentiable=True, **options)
        for _ in range(2):
            p.grad, p.curvature = g, h
            optimizer.step()
        return p

    p, g = random(3, seed=0).requires_grad_(), random(3, seed=1).requires_grad_()
    h = (g.detach().abs() * torch.tensor([0.1, 3.0, 0.5], dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(stepped, (p, g, h, torch.tensor(0.1, dtype=torch.float64, requires_grad=True)))


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_is_positive_or_none(bound: float) -> None:
    with pytest.raises(ValueError, match=r"bound must be positive, or None for the paper's algorithm: "):
        hesscale.AdaHesScale(made([(3,)]), bound=bound)


def test_the_bound_is_part_of_the_state() -> None:
    for bound in (None, 0.5):
        model = network()
        optimizer = hesscale.AdaHesScale(model.parameters(), bound=bound)
        train(model, optimizer)
        again = hesscale.AdaHesScale(model.parameters(), bound=2.0)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert again.param_groups[0]["bound"] == bound


def test_a_state_of_the_time_before_it_goes_on_as_it_was() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.02, bound=None)
    train(model, optimizer, range(3))
    old, other = optimizer.state_dict(), copy.deepcopy(model)
    del old["param_groups"][0]["bound"]
    again = hesscale.AdaHesScale(other.parameters())
    again.load_state_dict(copy.deepcopy(old))
    assert again.param_groups[0]["bound"] is None
    train(other, again, range(3, 6))
    train(model, optimizer, range(3, 6))
    assert_same(parameters(other), parameters(model))


def test_the_state_of_adam_gets_the_bound_of_the_optimizer() -> None:
    model = network()
    adam = torch.optim.Adam(model.parameters())
    loss_of(model).backward()
    adam.step()
    optimizer = hesscale.AdaHesScale(model.parameters(), bound=0.5)
    with pytest.warns(UserWarning, match="taken over"):
        optimizer.load_state_dict(adam.state_dict())
    assert optimizer.param_groups[0]["bound"] == 0.5


def leaping(**options: Any) -> tuple[hesscale.AdaHesScale, list[Any]]:
    """An optimizer with two parameters, the second of which has next to no curvature."""
    a, b = params = made([(50,), (60,)])
    optimizer = hesscale.AdaHesScale([("a", a), ("b", b)], **options)
    for p in params:
        p.grad, p.curvature = torch.ones_like(p), torch.ones_like(p)
    b.curvature = torch.full_like(b, 1e-6)
    return optimizer, params


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_leap_gets_one_warning_that_names_it(options: dict[str, Any]) -> None:
    optimizer, params = leaping(bound=None, **options)
    with pytest.warns(UserWarning, match=r"took the norm of b from 8\.89 to 7\.67e\+03: .*bound=1") as caught:
        optimizer.step()
    assert [record.filename for record in caught] == [__file__]
    for p in params:
        p.grad, p.curvature = 1e3 * torch.ones_like(p), torch.full_like(p, 1e-6)
    optimizer.step()  # a second warning would be an error


def test_with_a_bound_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = leaps.norms
    monkeypatch.setattr(leaps, "norms", lambda slots: seen.append(len(slots)) or original(slots))
    leaping(bound=10.0)[0].step()
    assert not seen
    with pytest.warns(UserWarning, match="norm of b"):
        leaping(bound=1e9)[0].step()
    assert seen == [2, 2]


def test_a_leap_later_on_is_found_in_one_of_ten_steps() -> None:
    optimizer, (a, b) = leaping(bound=None)
    with pytest.warns(UserWarning, match="norm of b") as caught:
        for step in range(25):
            for p in (a, b):
                p.grad, p.curvature = torch.ones_like(p), torch.ones_like(p)
            if step == 20:
                optimizer.state[b]["mean_curvature"].fill_(1e-6)
                b.curvature.fill_(1e-6)
            optimizer.step()
    assert len(caught) == 1


def test_small_parameters_that_grow_as_with_adam_are_no_leap() -> None:
    p = nn.Parameter(torch.full((50,), 1e-6))
    optimizer = hesscale.AdaHesScale([p], bound=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            p.grad, p.curvature = torch.ones_like(p), torch.ones_like(p)
            optimizer.step()
    assert p.abs().min() > 1e-3
