"""Updates of any torch optimizer, shortened to what curvature allows."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.applications.step_size import TrustRegion

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "foreach": lambda params: torch.optim.Adam(params, lr=0.1, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.05),
}
METHODS = ("hesscale", "hesscale_gn", "bl89", "hutchinson", "ggn_mc", "squared_gradient")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(10, 6, generator=generator).double(), torch.randint(4, (10,), generator=generator)


def train(model: nn.Module, optimizer: Any, steps: int = 5, first: int = 0) -> list[float]:
    """The factors of the steps."""
    factors = []
    for seed in range(first, first + steps):
        x, y = batch(seed)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        optimizer.backward(loss) if isinstance(optimizer, TrustRegion) else loss.backward()
        optimizer.step()
        factors.append(getattr(optimizer, "factor", 1.0))
    return factors


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("inner", INNER)
def test_without_a_limit_it_is_the_inner_optimizer_bit_for_bit(inner: str) -> None:
    ours, theirs = network(), network()
    assert train(ours, TrustRegion(INNER[inner](ours.parameters()), math.inf)) == [1.0] * 5
    train(theirs, INNER[inner](theirs.parameters()))
    assert torch.equal(flat(ours), flat(theirs))


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("beta", [0.0, 0.99])
def test_the_quadratic_model_gains_at_most_delta(inner: str, beta: float) -> None:
    """L = ½ Σ a (p − b)²: its curvature is exact, and L(p + u) − L(p) − g·u is what the bound speaks of."""
    a, b = torch.tensor([1e3, 1.0, 1e-2, 5.0]).double(), torch.tensor([1.0, -2.0, 3.0, 0.0]).double()
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer, delta = TrustRegion(INNER[inner]([p]), 1e-2, beta=beta), 1e-2
    gains, factors = [], []
    for _ in range(30):
        optimizer.zero_grad()
        old, loss = p.detach().clone(), (0.5 * a * (p - b) ** 2).sum()
        optimizer.backward(loss)
        g = p.grad
        assert g is not None
        optimizer.step()
        u = p.detach() - old
        gains.append(float((0.5 * a * (p.detach() - b) ** 2).sum() - loss.detach() - g @ u))
        factors.append(optimizer.factor)
    assert max(gains) <= delta * (1 + 1e-9)
    limited = [gain for gain, factor in zip(gains, factors, strict=True) if factor < 1]
    assert limited
    assert limited == pytest.approx([delta] * len(limited), rel=1e-9)


def test_the_update_is_the_inner_one_times_the_factor() -> None:
    """By hand, over two groups, with the average of |h| and its bias corrected."""
    model, other = network(), network()
    groups = [{"params": [*model[0].parameters()], "lr": 0.2}, {"params": [*model[2].parameters()], "lr": 0.01}]
    optimizer = TrustRegion(torch.optim.SGD(groups), 1e-5, beta=0.9)
    average = [torch.zeros_like(p) for p in other.parameters()]
    for step in range(1, 4):
        x, y = batch(step)
        params = [*other.parameters()]
        loss = F.cross_entropy(other(x), y)
        h = hesscale.diagonal(loss, params, retain_graph=True)
        g = torch.autograd.grad(loss, params)
        u = [-lr * one for lr, one in zip((0.2, 0.2, 0.01, 0.01), g, strict=True)]
        average = [0.9 * v + 0.1 * s.abs() for v, s in zip(average, h, strict=True) if s is not None]
        change = sum(float((v / (1 - 0.9**step) * d * d).sum()) for v, d in zip(average, u, strict=True))
        factor = min(1.0, math.sqrt(2e-5 / change))
        train(model, optimizer, steps=1, first=step)
        assert optimizer.factor == pytest.approx(factor, rel=1e-10)
        with torch.no_grad():
            for p, d in zip(params, u, strict=True):
                p += factor * d
        torch.testing.assert_close(flat(model), flat(other), rtol=1e-11, atol=1e-13)
    assert factor < 1


def test_it_shares_its_formula_with_the_trust_region_of_adahesscale() -> None:
    """One step of both on the same c and u: AdaHesScale's first V̂ = h², its c = √V = √(1 − β₂)·|h|."""
    p, q = (nn.Parameter(torch.tensor([1.0, -2.0, 0.5]).double()) for _ in range(2))
    g, h = torch.tensor([3.0, 1.0, -2.0]).double(), torch.tensor([4.0, -0.5, 2.0]).double()
    ours = hesscale.AdaHesScale([p], lr=1.0, trust_region=1e-3, eps=0.0, bound=None)
    u = g / h.abs()
    sgd = TrustRegion(torch.optim.SGD([q], lr=1.0), 1e-3 / math.sqrt(1 - 0.999))
    p.grad, p.curvature = g.clone(), h.clone()  # type: ignore[attr-defined]
    q.grad, q.curvature = u.clone(), h.clone()  # type: ignore[attr-defined]
    ours.step()
    sgd.step()
    torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_limits(method: str) -> None:
    model = network()
    factors = train(model, TrustRegion(INNER["Adam"](model.parameters()), 1e-6, method=method))
    assert all(0 < factor < 1 for factor in factors)
    assert all(getattr(p, "curvature", None) is None for p in model.parameters())


def test_a_rank_is_handed_on() -> None:
    found = []
    for rank in (0, 2):
        model = network()
        found.append(train(model, TrustRegion(INNER["Adam"](model.parameters()), 1e-6, rank=rank)))
    assert found[0] != found[1]


@pytest.mark.parametrize("method", ["hessian", "ggn", "kfac", "hesscale"])
def test_any_diagonal_may_be_refreshed_by_hand(method: str) -> None:
    model = network()
    optimizer = TrustRegion(INNER["SGD"](model.parameters()), 1e-4, method=None)
    optimizer.refresh(model, F.cross_entropy, [batch()], method=method, generator=torch.Generator().manual_seed(0))
    wanted = hesscale.estimate(method, model, F.cross_entropy, batch(), generator=torch.Generator().manual_seed(0))
    x, y = batch(1)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    moved = [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]
    change = sum(float((c.abs() * u * u).sum()) for c, u in zip(wanted.values(), moved, strict=True))
    assert optimizer.factor < 1
    assert change / 2 == pytest.approx(1e-4, rel=1e-9)
    optimizer.refresh(model, diagonal={name: torch.zeros_like(p) for name, p in model.named_parameters()})
    optimizer.step()
    assert optimizer.factor == 1


def test_curvature_is_computed_in_every_kth_step_and_for_a_new_group() -> None:
    model, extra = network(), nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = TrustRegion(INNER["Adam"](model.parameters()), 1e-4, every=3)
    seen = []
    for step in range(9):
        if step == 4:
            optimizer.add_param_group({"params": [extra]})
        seen.append(optimizer.curvature_due)
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(batch(step)[0]) * extra, batch(step)[1]))
        optimizer.step()
    assert seen == [True, False, False, True, True, False, False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "delta must be positive: 0.0"),
        ({"delta": math.nan}, "delta must be positive: nan"),
        ({"delta": 1.0, "every": 0}, "every must be a whole number"),
        ({"delta": 1.0, "beta": 1.0}, "beta must lie in"),
        ({"delta": 1.0, "method": "kfac"}, "unknown method 'kfac'"),
        ({"delta": 1.0, "method": "bl89", "rank": 2}, "rank= goes with"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrustRegion(INNER["SGD"](network().parameters()), **options)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (lambda params: params, "wraps a torch optimizer, not a generator"),
        (hesscale.AdaHesScale, "AdaHesScale reads curvature itself: use its own trust_region="),
        (torch.optim.LBFGS, "LBFGS takes several steps in one"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(inner: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TrustRegion(inner(network().parameters()), 1.0)


@pytest.mark.parametrize("field", ["grad", "curvature"])
def test_values_that_are_not_finite_change_nothing(field: str) -> None:
    model = network()
    optimizer = TrustRegion(INNER["Adam"](model.parameters()), 1e-4)
    optimizer.backward(F.cross_entropy(model(batch()[0]), batch()[1]))
    getattr(model[2].weight, field)[0, 0] = math.nan
    before, state = flat(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"(gradient|curvature) of parameter 2 .* not finite; nothing was changed"):
        optimizer.step()
    assert torch.equal(flat(model), before)
    assert optimizer.state_dict() == state


def test_a_step_without_curvature_says_what_to_call() -> None:
    model = network()
    optimizer = TrustRegion(INNER["Adam"](model.parameters()), 1e-4)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    before = flat(model)
    with pytest.raises(RuntimeError, match=r"no fresh curvature .* call optimizer.backward\(loss\)"):
        optimizer.step()
    assert torch.equal(flat(model), before)


def test_a_diagonal_of_another_model_is_refused() -> None:
    model, other = network(), network(1)
    optimizer = TrustRegion(INNER["Adam"](model.parameters()), 1e-4, method=None)
    with pytest.raises(ValueError, match="made for another model"):
        optimizer.refresh(other, diagonal=dict(other.named_parameters()))


def test_a_step_that_nothing_limits_is_refused() -> None:
    model = network()
    optimizer = TrustRegion(INNER["Adam"](model.parameters()), 1e-4, method=None)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    before = flat(model)
    with pytest.raises(RuntimeError, match=r"call optimizer.refresh\(model, ...\) before it"):
        optimizer.step()
    assert torch.equal(flat(model), before)


def test_a_batch_whose_inner_step_fails_does_not_count() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise OSError("mine")

    model = network()
    optimizer = TrustRegion(INNER["SGD"](model.parameters()), 1e-4)
    train(model, optimizer, steps=1)
    before, state = flat(model), copy.deepcopy(optimizer.state_dict()["trust_region"])
    optimizer.inner, kept = Failing(model.parameters(), lr=0.1), optimizer.inner
    with pytest.raises(OSError, match="mine"):
        train(model, optimizer, steps=1, first=1)
    optimizer.inner = kept
    assert torch.equal(flat(model), before)
    now = optimizer.state_dict()["trust_region"]
    assert now["wait"] == state["wait"]
    for i, (value, weight) in state["averages"].items():
        assert torch.equal(now["averages"][i][0], value) and now["averages"][i][1] == weight


def test_without_a_limit_the_factor_is_one_even_if_the_gain_overflows() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = TrustRegion(torch.optim.SGD(model.parameters(), lr=1e15), math.inf)
    optimizer.backward(1e15 * model(torch.ones(1, 1)).square().sum())
    optimizer.step()
    assert optimizer.factor == 1.0
