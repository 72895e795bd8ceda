"""The formula: against torch.optim.Adam, against the official trajectories, and against a slow version of itself."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hesscale
from hesscale.optim import CurvatureScaled, Hutchinson, Propagated, SampledGaussNewton, Source

from ..test_golden import LAYERS, LOSSES
from .small import assert_close, assert_same, loss_of, network, parameters, random, train

TRAJECTORIES = sorted((Path(__file__).parents[1] / "golden" / "trajectories").glob("*.npz"))
IMPLEMENTATIONS: list[dict[str, Any]] = [
    {},
    {"foreach": False},
    {"foreach": True},
    {"capturable": True},
    {"differentiable": True},
]
HALF = (torch.bfloat16, torch.float16)


def test_all_trajectories_are_here() -> None:
    assert len(TRAJECTORIES) == 4


@pytest.mark.parametrize("path", TRAJECTORIES, ids=lambda path: path.stem)
def test_the_official_optimizers(path: Path) -> None:
    with np.load(path) as arrays:
        values = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "meta"}
        meta = json.loads(str(arrays["meta"]))
    model = nn.Sequential(*(LAYERS[kind](*arguments) for kind, *arguments in meta["spec"])).double()
    model.load_state_dict({name[8:]: value for name, value in values.items() if name.startswith("param/0/")})
    preset = hesscale.AdaHesScaleGN if path.stem.startswith("adahesscalegn") else hesscale.AdaHesScale
    optimizer = preset(model.parameters(), lr=meta["lr"], betas=meta["betas"], eps=meta["eps"], bound=None)
    checked = 0
    for step in range(1, meta["steps"] + 1):
        optimizer.zero_grad()
        loss = LOSSES[meta["loss"]](model(values[f"x/{step}"]), values[f"y/{step}"], reduction=meta["reduction"])
        assert_close([loss.detach()], [values[f"loss/{step}"]], 1e-10)
        optimizer.backward(loss)
        optimizer.step()
        for name, p in model.named_parameters():
            if f"param/{step}/{name}" in values:
                assert_close([p.detach()], [values[f"param/{step}/{name}"]], 1e-10)
                checked += 1
    assert checked == 3 * len(list(model.parameters()))


def leaves(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(7, 5), (), (3,), (2, 3, 3, 3)]
    found = [random(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    return found if options.get("differentiable") else [p.requires_grad_() for p in found]


def feed(params: list[Tensor], step: int, *, same: bool = False) -> None:
    for index, p in enumerate(params):
        p.grad = random(*p.shape, seed=1000 + 10 * step + index).to(p.dtype)
        h = p.grad.clone() if same else random(*p.shape, seed=2000 + 10 * step + index).to(p.dtype)
        p.curvature = h


def run(options: dict[str, Any], steps: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    params = leaves(options, dtype)
    optimizer = hesscale.AdaHesScale(params, **{"lr": 0.01, **options})
    for step in range(steps):
        feed(params, step)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("options", IMPLEMENTATIONS, ids=str)
def test_with_the_gradient_for_curvature_it_is_adam(
    options: dict[str, Any], weight_decay: float, dtype: torch.dtype
) -> None:
    ours, theirs = leaves(options, dtype), leaves({}, dtype)
    optimizer = hesscale.AdaHesScale(ours, lr=0.01, weight_decay=weight_decay, bound=None, **options)
    kind = torch.optim.AdamW if weight_decay else torch.optim.Adam
    adam = kind(theirs, lr=0.01, weight_decay=weight_decay, foreach=False, fused=False)
    for step in range(6):
        feed(ours, step, same=True)
        feed(theirs, step)
        optimizer.step()
        adam.step()
    # not bit for bit: a root of V is kept here, V itself there
    assert_close(ours, theirs, {torch.float64: 1e-12, torch.float32: 1e-6}[dtype])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", IMPLEMENTATIONS, ids=str)
def test_in_half_precision_it_is_adam_in_single_rounded_after_each_step(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    ours, wide = leaves(options, dtype), [p.detach().float().requires_grad_() for p in leaves({}, dtype)]
    optimizer = hesscale.AdaHesScale(ours, lr=0.01, weight_decay=0.1, bound=None, **options)
    adam = torch.optim.AdamW(wide, lr=0.01, weight_decay=0.1, foreach=False, fused=False)
    for step in range(6):
        feed(ours, step, same=True)
        for p, q in zip(ours, wide, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        adam.step()
        with torch.no_grad():
            for q in wide:
                q.copy_(q.to(dtype))
    tolerance = 0.0 if options.keys() & {"foreach", "differentiable"} else torch.finfo(dtype).eps
    assert_close([p.detach() for p in ours], [q.detach().to(dtype) for q in wide], tolerance)
    assert {optimizer.state[p][name].dtype for p in ours for name in ("exp_avg", "mean_curvature")} == {torch.float32}


def test_parameters_in_half_precision_move() -> None:
    """With curvature whose square underflows in half precision."""
    p = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = hesscale.AdaHesScale([p], lr=0.01)
    for _ in range(3):
        p.grad, p.curvature = torch.full_like(p, 1e-4), torch.full_like(p, 1e-4, dtype=torch.float32)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 0.97).detach(), rtol=0, atol=2e-3)


def slowly(options: dict[str, Any], steps: int = 5) -> list[Tensor]:
    """The formula of updates.py entry by entry, with Python's numbers."""
    lr, every, radius = 0.01, options.get("every", 1), options.get("trust_region")
    eps, inside, decay = options.get("eps", 1e-8), options.get("eps_inside_root", False), options.get("weight_decay", 0)
    scale, sign = options.get("scale", "rms"), -1.0 if options.get("maximize") else 1.0
    bound = options.get("bound", 1.0) or math.inf
    tensors = leaves({"differentiable": True})
    params = [p.flatten().tolist() for p in tensors]
    m = [[0.0] * len(p) for p in params]
    v = [[0.0] * len(p) for p in params]
    average = {"rms": lambda h: h * h, "mean_abs": abs, "mean": lambda h: h}[scale]
    refreshes = 0
    for step in range(steps):
        feed(tensors, step)
        due = step < every or step % every == 0
        refreshes += due
        u = [[0.0] * len(p) for p in params]
        length = 0.0
        for i, p in enumerate(tensors):
            for j, (g, h) in enumerate(zip(p.grad.flatten().tolist(), p.curvature.flatten().tolist(), strict=True)):
                m[i][j] = 0.9 * m[i][j] + 0.1 * sign * g
                if due:
                    v[i][j] = 0.999 * v[i][j] + 0.001 * average(h)
                hat = abs(v[i][j]) / (1 - 0.999**refreshes)
                root = math.sqrt(hat + eps) if inside else (math.sqrt(hat) if scale == "rms" else hat) + eps
                ratio = m[i][j] / (1 - 0.9 ** (step + 1)) / root
                u[i][j] = lr * max(-bound, min(bound, ratio))
                length += (math.sqrt(v[i][j]) if scale == "rms" else abs(v[i][j])) * u[i][j] ** 2
        factor = 1.0 if radius is None else min(1.0, math.sqrt(2 * radius / length))
        params = [
            [(1 - lr * decay) * a - factor * b for a, b in zip(p, q, strict=True)]
            for p, q in zip(params, u, strict=True)
        ]
    return [torch.tensor(p, dtype=torch.float64).view(q.shape) for p, q in zip(params, tensors, strict=True)]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"eps": 0.1},
    {"eps": 0.1, "eps_inside_root": True},
    {"maximize": True},
    {"weight_decay": 0.3, "trust_region": 1e-5},
    {"every": 3, "weight_decay": 0.3},
    {"every": 2, "trust_region": 1e-4, "maximize": True},
    {"trust_region": 1e9},
    {"scale": "mean_abs", "eps": 1e-3},
    {"scale": "mean", "eps": 1e-3, "every": 2},
    {"scale": "mean", "trust_region": 1e-5},
    {"bound": None},
    {"bound": None, "eps": 0.1, "eps_inside_root": True},
    {"bound": None, "weight_decay": 0.3, "trust_region": 1e-5},
    {"bound": None, "scale": "mean", "eps": 1e-3, "every": 2},
    {"bound": 0.1, "every": 3, "maximize": True},
]


@pytest.mark.filterwarnings("ignore:a step took the norm")  # without a bound
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_variant_follows_its_formula(options: dict[str, Any], foreach: bool) -> None:
    assert_close(run({**options, "foreach": foreach}), slowly(options), 1e-11)


def test_the_trust_region_bounds_the_step() -> None:
    """½ Σ c u² ≤ δ; far inside of it nothing changes."""
    radius = 1e-6
    params = leaves({})
    optimizer = hesscale.AdaHesScale(params, lr=1.0, trust_region=radius)
    for step in range(4):
        before = [p.detach().clone() for p in params]
        feed(params, step)
        optimizer.step()
        c = [optimizer.state[p]["mean_curvature"] for p in params]
        u = [a - p.detach() for a, p in zip(before, params, strict=True)]
        length = sum(float((a * b * b).sum()) for a, b in zip(c, u, strict=True))
        assert 0.5 * length == pytest.approx(radius, rel=1e-9)
    assert_close(run({"trust_region": 1e9}), run({}), 1e-13)


def test_one_trust_region_spans_all_groups() -> None:
    def moved(*groups: list[int]) -> list[Tensor]:
        params = leaves({})
        optimizer = hesscale.AdaHesScale(
            [{"params": [params[i] for i in group]} for group in groups], trust_region=1e-8
        )
        feed(params, 0)
        optimizer.step()
        return [p.detach() for p in params]

    assert_close(moved([0, 1, 2, 3]), moved([0, 2], [1, 3]), 1e-14)


def test_curvature_is_asked_for_at_first_and_in_every_kth_step() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters(), every=3)
    due = []
    train(model, optimizer, range(8), before_step=lambda: due.append(next(model.parameters()).curvature is not None))
    assert due == [True, True, True, True, False, False, True, False]
    states = optimizer.state.values()
    assert [(state["step"].item(), state["refreshes"]) for state in states] == [(8.0, 5)] * 4


def test_a_layer_unfrozen_between_refreshes_waits_for_the_next() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = hesscale.AdaHesScale(model.parameters(), every=3)
    train(model, optimizer, range(4))
    model[0].requires_grad_(True)
    before = parameters(model[0])
    train(model, optimizer, range(4, 6))
    assert_same(parameters(model[0]), before)
    train(model, optimizer, range(6, 7))
    assert not torch.equal(parameters(model[0])[0], before[0])
    assert optimizer.state[model[0].weight]["step"] == 1


def test_a_step_can_be_differentiated() -> None:
    def stepped(p: Tensor, g: Tensor, h: Tensor, lr: Tensor) -> Tensor:
        p = p.clone()
        optimizer = hesscale.AdaHesScale([p], lr=lr, weight_decay=0.1, differentiable=True)
        for _ in range(2):
            p.grad, p.curvature = g, h
            optimizer.step()
        return p

    p, g, h = (random(3, seed=seed).requires_grad_() for seed in range(3))
    assert torch.autograd.gradcheck(stepped, (p, g, h, torch.tensor(0.1, dtype=torch.float64, requires_grad=True)))


def test_the_template_takes_curvature_from_anywhere_and_computes_none() -> None:
    p = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = CurvatureScaled([p], lr=0.1)
    p.grad, p.curvature = torch.full_like(p, 2.0), torch.full_like(p, 4.0)  # type: ignore[attr-defined]
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 1 - 0.1 * 2 / 4).detach())
    for call in (optimizer.backward, optimizer.attach, lambda _: optimizer.armed()):
        with pytest.raises(NotImplementedError, match="AdaHesScale"):
            call(p.sum())


@pytest.mark.parametrize(
    ("source", "preset"),
    [
        (Propagated(), hesscale.AdaHesScale),
        (Propagated("hesscale_gn"), hesscale.AdaHesScaleGN),
        (Propagated("bl89"), hesscale.AdaBL89),
        (Hutchinson(), hesscale.AdaHessian),
        (SampledGaussNewton(), hesscale.AdaGGNMC),
    ],
    ids=str,
)
def test_a_source_makes_the_template_a_preset(source: Source, preset: type[CurvatureScaled]) -> None:
    found = []
    for make in (lambda params: CurvatureScaled(params, source=source), preset):
        model = network()
        first = make(model.parameters())
        model, optimizer = copy.deepcopy((model, first))  # copies keep their source
        assert optimizer.source == first.source == source
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, step))
            optimizer.step()
        found.append(parameters(model))
    assert_same(*found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative: -1.0"),
        ({"lr": math.nan}, "lr"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"eps": -1e-8}, "eps"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": (0.9, 0.9, 0.9)}, "betas must be two numbers"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
        ({"trust_region": 0.0}, "trust_region"),
        ({"scale": "max"}, "choose one of 'rms', 'mean_abs', 'mean'"),
        ({"scale": "mean", "eps_inside_root": True}, "needs a root"),
        ({"fused": True, "foreach": True}, "choose one"),
        ({"differentiable": True, "foreach": True}, "loop"),
        ({"capturable": True, "every": 2}, "every=1"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hesscale.AdaHesScale(leaves({}), **options)


def test_groups_cannot_differ_in_their_trust_region() -> None:
    a, b, *_ = leaves({})
    with pytest.raises(ValueError, match="all groups together"):
        hesscale.AdaHesScale([{"params": [a]}, {"params": [b], "trust_region": 1.0}])
