"""The kernel of torch.compile: equal to the loop, made once for all sizes, and done without where no compiler is."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import codecache

import hesscale
from hesscale.optim import kernel, native

from .small import assert_close, network, parameters, random, train

SHAPES = [(40, 30), (7,), (1,), (), (16, 3, 3, 3), (2, 2), (64,), (5, 9), (33,), (128, 8), (3, 1)]  # more than WIDTH


def run(options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    params = [nn.Parameter(random(*shape, seed=seed).to(dtype)) for seed, shape in enumerate(SHAPES)]
    params[4] = nn.Parameter(params[4].detach().to(memory_format=torch.channels_last))
    optimizer = hesscale.AdaHesScale(params, lr=0.01, weight_decay=0.1, **options)
    for step in range(4):
        for index, p in enumerate(params):
            p.grad = torch.empty_like(p).copy_(random(*p.shape, seed=1000 + 20 * step + index))
            p.curvature = torch.empty_like(p).copy_(random(*p.shape, seed=2000 + 20 * step + index))
            if p.dim() == 1 and p.numel() > 1:
                p.curvature[0] = 0.0
        params[1].grad = None if step == 1 else params[1].grad  # parameters of different age
        optimizer.step()
    return [p.detach() for p in params]


def test_the_kernel_equals_the_loop() -> None:
    """One compilation, which takes seconds; the other variants are tested uncompiled below."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch.compile's own
        patch.setattr(native, "library", lambda: None)
        assert_close(run({"fused": True}, torch.float64), run({}, torch.float64), 1e-13)


def test_every_variant_of_the_kernel_uncompiled() -> None:
    for options in (
        {},
        {"capturable": True},
        {"eps": 0.1, "eps_inside_root": True},
        {"scale": "mean_abs"},
        {"scale": "mean", "eps": 1e-3},
        {"every": 2, "trust_region": 1e-5},
        {"every": 2, "maximize": True},
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            patch.setattr(kernel, "_kernel", lambda variant: kernel._formula)
            ours = run({"fused": True, **options}, torch.float64)
        assert_close(ours, run(options, torch.float64), 1e-12)


def test_without_a_compiler_one_warning_and_the_same_steps() -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler")

    native.library.cache_clear()
    kernel._kernel.cache_clear()
    kernel._warn_once.cache_clear()
    try:
        model, other = network(), network()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codecache.CppCodeCache, "load", broken)
            patch.setattr(torch, "compile", lambda *_, **__: broken)
            with pytest.warns(UserWarning, match=r"failed here \(RuntimeError\): falling back to foreach") as caught:
                train(model, hesscale.AdaHesScale(model.parameters(), fused=True, every=2))
        assert len(caught) == 1
        assert native.library() is None
    finally:
        native.library.cache_clear()
        kernel._kernel.cache_clear()
        kernel._warn_once.cache_clear()
    train(other, hesscale.AdaHesScale(other.parameters(), foreach=True, every=2))
    assert_close(parameters(model), parameters(other), 1e-15)
