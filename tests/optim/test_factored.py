"""Steps with curvature that is not written out are the steps with curvature that is."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.optim import borrowed, checks, native
from hesscale.outer import Outer

from ..test_price import Counting
from .small import assert_close, assert_same

Options = dict[str, Any]

OPTIONS: list[Options] = [
    {},
    {"scale": "mean_abs"},
    {"scale": "mean"},
    {"eps_inside_root": True},
    {"trust_region": 0.1},
    {"every": 2},
    {"weight_decay": 0.1, "maximize": True},
    {"foreach": True},
    {"foreach": False},
    {"capturable": True},
]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 350, bias=False), nn.Tanh(), nn.Linear(350, 10))
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, seed: int, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 300, generator=generator, dtype=next(model.parameters()).dtype)
    return F.cross_entropy(model(x), torch.arange(rows) % 10)


def trained(options: Options, *, factored: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    model = network(dtype)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3, **options)
    for step, rows in enumerate((1, 1, 3, 1, 1)):
        loss = loss_of(model, step, rows)
        if factored:
            optimizer.backward(loss)
        else:
            hesscale.backward(loss)
        stays = sum(isinstance(getattr(p, "curvature", None), Outer) for p in model.parameters())
        assert stays == (2 if factored and rows == 1 and getattr(model[0].weight, "curvature", None) is not None else 0)
        optimizer.step()
        optimizer.zero_grad()
    averages = [optimizer.state[p]["exp_curvature"] for p in model.parameters()]
    return [*(p.detach() for p in model.parameters()), *averages]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_steps_are_those_of_written_curvature(options: Options) -> None:
    found, expected = (trained(options, factored=factored) for factored in (True, False))
    assert_close(found, expected, tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [o for o in OPTIONS if not {"foreach", "capturable"} & o.keys()], ids=str)
def test_the_kernel_makes_the_same_steps_bit_for_bit(options: Options, dtype: torch.dtype) -> None:
    found, expected = (trained({"fused": True, **options}, factored=f, dtype=dtype) for f in (True, False))
    assert_same(found, expected)


@pytest.mark.parametrize("fused", [None, True])
def test_nothing_as_large_as_a_weight_is_allocated_or_written_out(fused: bool | None) -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3, fused=fused)
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        curvature: Any = [p.curvature for p in model.parameters()]  # type: ignore[attr-defined]
        with Counting() as counting:
            optimizer.step()
        assert all(h.factors is not None for h in curvature if isinstance(h, Outer))
        assert step == 0 or not counting.allocations.total()  # the averages are made in the first


WAYS: list[Options] = [{}, {"fused": True}, {"foreach": False}, {"foreach": True}, {"differentiable": True}]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_curvature_that_is_not_finite_is_seen_in_its_factors(value: float, options: Options) -> None:
    for which in (0, 1):
        model = network()
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3, **options)
        optimizer.backward(loss_of(model, 0))
        before = [p.detach().clone() for p in model.parameters()]
        model[2].weight.curvature.factors[which][7] = value  # type: ignore[union-attr,operator]
        with pytest.raises(RuntimeError, match=r"curvature of parameter 2 .* is not finite"):
            optimizer.step()
        assert_same([p.detach() for p in model.parameters()], before)


@pytest.mark.parametrize("fused", [None, True])
def test_factors_whose_product_overflows_are_refused_and_others_are_not(fused: bool | None) -> None:
    results = []
    for column, row in ((1e30, 1e-32), (1e30, 1e30)):
        p = nn.Parameter(torch.ones(300, 300))
        optimizer = hesscale.AdaHesScale([p], lr=1e-3, fused=fused)
        p.grad = torch.ones_like(p)
        p.curvature = Outer(torch.full((300,), column), torch.full((300,), row))  # type: ignore[attr-defined]
        if column * row > 1e38:
            with pytest.raises(RuntimeError, match="not finite"):
                optimizer.step()
            assert torch.all(p == 1)
        else:
            optimizer.step()
            results.append(p.detach())
    assert_close(results, [torch.full((300, 300), 1 - 1e-3 / 0.01)], tolerance=1e-5)


@pytest.mark.parametrize("sizes", [(1e-30, 1e28), (1e25, 1e-24), (3.0, 0.2), (-1e-7, 1e-8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_average_of_squares_is_right_whatever_the_sizes_of_factors(
    sizes: tuple[float, float], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    column, row = (size * (0.5 + torch.rand(310, generator=generator, dtype=torch.float64)) for size in sizes)
    p = nn.Parameter(torch.zeros(310, 310, dtype=dtype))
    optimizer = hesscale.AdaHesScale([p])
    p.grad = torch.ones_like(p)
    p.curvature = Outer(column.to(dtype), row.to(dtype))  # type: ignore[attr-defined]
    optimizer.step()
    expected = (1 - 0.999) * torch.outer(column, row).square()
    found = optimizer.state[p]["exp_curvature"].double()
    assert torch.allclose(found, expected, rtol=2e-6 if dtype == torch.float32 else 1e-13, atol=0)


@pytest.mark.parametrize("options", WAYS[:-1], ids=str)
def test_zero_factors_are_zero_curvature(options: Options) -> None:
    p = nn.Parameter(torch.ones(300, 300))
    optimizer = hesscale.AdaHesScale([p], **options)
    p.grad = torch.ones_like(p)
    column = torch.ones(300)
    column[5] = 0
    p.curvature = Outer(column, torch.ones(300))  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.all(p[5] == 1) and torch.all(p[:5] != 1) and torch.all(p[6:] != 1)
    p.grad = torch.ones_like(p)
    p.curvature = Outer(torch.zeros(300), torch.ones(300))  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the average is not zero, so there is nothing to warn of
        optimizer.step()
    assert torch.all(p[5] == 1)
    fresh = nn.Parameter(torch.ones(300, 300))
    fresh.grad = torch.ones_like(fresh)
    fresh.curvature = Outer(torch.zeros(300), torch.ones(300))  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="curvature is zero everywhere"):
        hesscale.AdaHesScale([fresh], **options).step()
    assert torch.all(fresh == 1)


@pytest.mark.parametrize("logs", [False, True])
def test_a_loss_scale_is_divided_out(logs: bool) -> None:
    results = []
    for scale in (1.0, 1024.0):
        model = network()
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(2):
            optimizer.zero_grad()
            optimizer.backward(scaler.scale(loss_of(model, step)))
            if logs:
                with torch.inference_mode():
                    assert all(p.curvature.norm() > 0 for p in model.parameters())  # type: ignore[attr-defined]
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach() for p in model.parameters()])
    assert_same(*results)


def test_hooks_see_curvature_that_is_written_out() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3)
    kinds: set[type] = set()
    optimizer.register_curvature_hook(lambda o: kinds.update(type(p.curvature) for p in model.parameters()))  # type: ignore[attr-defined]
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    assert kinds == {Tensor}


def test_the_ways_through_the_step_are_the_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module, name in ((borrowed, "_refreshed"), (native, "_fit"), (checks, "non_finite")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _f=original, _n=name: (calls.append(_n), _f(*a))[1])
    for fused in (None, True):
        model = network()
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3, fused=fused)
        optimizer.backward(loss_of(model, 0))
        optimizer.step()
    assert calls == ["_refreshed", "_refreshed", "_fit", "_fit"]
