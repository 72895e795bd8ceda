"""Training as it happens: half precision, checkpoints, functional calls, functions of one's own, compiled models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hesscale
from hesscale.rules import RULES
from hesscale.testing import check_rule


class Block(nn.Module):
    """Convolution, group norm, attention and a shared linear layer: most of what models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.convolution(x))).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + torch.tanh(self.layer(F.silu(self.layer(x))))
        return self.head(x.mean(1))


def network(dtype: torch.dtype = torch.float32) -> tuple[Block, Tensor, Tensor]:
    torch.manual_seed(0)
    return Block().to(dtype), torch.randn(5, 4, 6, dtype=dtype), torch.tensor([0, 1, 2, 1, 0])


def curvatures(model: nn.Module) -> list[Tensor]:
    return [p.curvature for p in model.parameters()]


def test_autocast_keeps_curvature_in_single_precision() -> None:
    model, x, y = network()
    hesscale.backward(F.cross_entropy(model(x), y))
    full = [c.clone() for c in curvatures(model)]
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        hesscale.backward(loss)
        for ours, theirs in zip(curvatures(model), full, strict=True):
            assert ours.dtype is torch.float32
            assert (ours - theirs).abs().sum() <= tolerance * theirs.abs().sum()


def test_backward_under_autocast_is_the_same() -> None:
    model, x, y = network()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
        hesscale.backward(loss, retain_graph=True)
        inside = [c.clone() for c in curvatures(model)]
    model.zero_grad()
    hesscale.backward(loss)
    for ours, theirs in zip(curvatures(model), inside, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3 * float(theirs.abs().max()))


def test_parameters_in_half_precision_have_curvature_in_single() -> None:
    model, x, y = network()
    model.to(torch.bfloat16)
    hesscale.backward(F.cross_entropy(model(x.bfloat16()), y))
    assert all(c.dtype is torch.float32 and torch.isfinite(c).all() for c in curvatures(model))


def test_scaled_losses_scale_curvature() -> None:
    model, x, y = network(torch.float64)
    hesscale.backward(F.cross_entropy(model(x), y))
    plain = [c.clone() for c in curvatures(model)]
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(hesscale.attach(F.cross_entropy(model(x), y))).backward()
    torch.testing.assert_close([c / 256 for c in curvatures(model)], plain, rtol=1e-12, atol=1e-12)


def test_micro_batches_accumulate() -> None:
    model, x, y = network(torch.float64)
    hesscale.backward(F.cross_entropy(model(x), y, reduction="sum"))
    whole = [c.clone() for c in curvatures(model)]
    model.zero_grad()
    for part in (slice(0, 2), slice(2, 5)):
        hesscale.backward(F.cross_entropy(model(x[part]), y[part], reduction="sum"))
    torch.testing.assert_close(curvatures(model), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
def test_checkpoints(method: str) -> None:
    model, x, y = network(torch.float64)
    hesscale.backward(F.cross_entropy(model(x), y), method=method)
    plain, grads = [c.clone() for c in curvatures(model)], [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    calls = 0

    def counted(inputs: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return model(inputs)

    logits = checkpoint(counted, x.clone().requires_grad_(), use_reentrant=False)
    hesscale.backward(F.cross_entropy(logits, y), method=method)
    torch.testing.assert_close(curvatures(model), plain, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))  # type: ignore[arg-type]
    assert calls == 2  # forward, and one recomputation for gradient and curvature together


def test_checkpointed_expressions_that_meet_again() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    check_rule(lambda t: checkpoint(lambda z: z * torch.sigmoid(z), t, use_reentrant=False), x)


def test_a_checkpoint_is_recomputed_once_however_many_expressions_meet_again() -> None:
    calls = 0

    def block(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        z = z * torch.sigmoid(z)
        return z * torch.tanh(z)

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    hesscale.backward(checkpoint(block, x, use_reentrant=False).pow(3).sum())
    assert calls == 2
    (plain,) = hesscale.diagonal(block(x).pow(3).sum(), x)
    torch.testing.assert_close(x.curvature, plain, rtol=1e-12, atol=1e-12)


def test_selective_checkpoints_with_expressions_that_meet_again() -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def block(z: Tensor) -> Tensor:
        z = z @ weight
        return z * torch.sigmoid(z)

    x = torch.randn(4, 3, dtype=torch.float64)
    context = partial(create_selective_checkpoint_contexts, policy)
    hesscale.backward(checkpoint(block, x, use_reentrant=False, context_fn=context).pow(2).sum())
    (plain,) = hesscale.diagonal(block(x).pow(2).sum(), weight)
    torch.testing.assert_close(weight.curvature, plain, rtol=1e-12, atol=1e-12)


def test_functional_calls() -> None:
    model, x, y = network(torch.float64)
    hesscale.backward(F.cross_entropy(model(x), y))
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = F.cross_entropy(torch.func.functional_call(model, copies, (x,)), y)
    found = hesscale.diagonal(loss, list(copies.values()))
    torch.testing.assert_close(list(found), curvatures(model), rtol=1e-12, atol=1e-12)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def test_functions_of_ones_own_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RULES, "_rows", dict(RULES._rows))
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(hesscale.MissingRuleError, match="CubeBackward"):
        hesscale.diagonal(Cube.apply(x).sum(), x)
    hesscale.register(hesscale.Elementwise(lambda node: (None, 6 * node.saved_tensors[0])), Cube)
    check_rule(Cube.apply, x)
    with pytest.raises(ValueError, match="already registered"):
        hesscale.register(hesscale.Elementwise(), Cube)


def test_models_of_another_backend_take_turns_with_eager_ones() -> None:
    """The recipe of docs/any-model.md: compiled steps, and an eager one every k-th time for the curvature."""
    model, x, y = network()
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(hesscale.MissingRuleError, match="backend='hesscale'"):
        hesscale.backward(F.cross_entropy(compiled(x), y))
    for step in range(4):
        model.zero_grad()
        if step % 2:
            F.cross_entropy(compiled(x), y).backward()
        else:
            with torch.compiler.set_stance("force_eager"):
                hesscale.backward(F.cross_entropy(compiled(x), y))
            assert all(torch.isfinite(c).all() for c in curvatures(model))
