"""Checkpoints of every kind: each is recomputed once, whatever reads it, and gives what there is without."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    GraphExecGroup,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import hesscale
from hesscale import recomputing
from hesscale.estimators import ESTIMATORS
from hesscale.optim.sources import hutchinson_backward, sampled_gauss_newton_backward
from hesscale.testing import exact_diagonal, twice_differentiable

Part = Callable[[Tensor], Tensor]
ops = torch.ops.aten


def kept(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Products are saved, all else is recomputed."""
    return CheckpointPolicy.MUST_SAVE if op is ops.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def plain(part: Part, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=False)  # type: ignore[no-any-return]


def nested(part: Part, x: Tensor) -> Tensor:
    return plain(lambda outer: plain(part, outer.neg()).cos(), -x)


def to_the_end(part: Part, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return plain(part, x)


def selective(part: Part, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(part, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def offloaded(part: Part, x: Tensor) -> Tensor:
    with save_on_cpu():
        return part(x)


KINDS: dict[str, tuple[Callable[[Part, Tensor], Tensor], Callable[[Part, Tensor], Tensor]]] = {
    "plain": (plain, lambda part, x: part(x)),
    "nested": (nested, lambda part, x: part((-x).neg()).cos()),
    "to the end": (to_the_end, lambda part, x: part(x)),
    "selective": (selective, lambda part, x: part(x)),
    "offloaded": (offloaded, lambda part, x: part(x)),
}


class Twice(torch.autograd.Function):
    """Reads what it saved more than once, in more than one way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: int) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(x)
        return x**p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.p * x ** (ctx.p - 1), None


def written(net: Net, x: Tensor) -> Tensor:
    """As in Swin v2 and DeBERTa: the node of a write into a slice hides what it has saved."""
    h = net.a(x).tanh().mul(1.5)
    h[:, :2] *= net.k
    h[:, 1:] += h[:, :-1].clone()
    return h.sin()  # type: ignore[no-any-return]


def meeting(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    h = h * h.sigmoid()
    return net.b(h).relu() * net.k.mean()  # type: ignore[no-any-return]


def nothing_in_sight(net: Net, x: Tensor) -> Tensor:
    """Nothing is saved but by writes into slices."""
    h = net.a(x).clone()
    h = plain(lambda t: _scaled(t.clone(), net.k), h)
    return h.tanh()


def _scaled(h: Tensor, k: Tensor) -> Tensor:
    h[:, 2:] *= k
    return h


def attention(net: Net, x: Tensor) -> Tensor:
    """A fused kernel, which methods that differentiate twice must avoid when they recompute it, too."""
    h = net.b(net.a(x)).view(1, 5, 2, 2).transpose(1, 2) * net.k
    found = F.scaled_dot_product_attention(h, h.cos(), h.sin(), is_causal=True)
    return found.transpose(1, 2).reshape(5, 4)


def dropping(net: Net, x: Tensor) -> Tensor:
    """Several passes at once are a vmap, in which nobody can draw."""
    return F.dropout(net.a(x) * net.k.mean()).tanh()


PARTS = {
    "written": written,
    "meeting": meeting,
    "nothing in sight": nothing_in_sight,
    "attention": attention,
    "dropping": dropping,
}


class Net(nn.Module):
    """A part of a network, checkpointed in one of many ways, and a last layer; counts how often the part was run."""

    def __init__(self, part: Callable[[Net, Tensor], Tensor], how: Callable[[Part, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.k = nn.Parameter(torch.tensor([0.7, -1.2]))
        self.double()
        self.part, self.how, self.runs = part, how, 0

    def run(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.part(self, x)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(2)
        return self.last(self.how(self.run, x))  # type: ignore[no-any-return]


X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0, 1])


def loss_of(net: Net) -> Tensor:
    return F.cross_entropy(net(X.to(net.k.dtype)), Y)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def backward(net: Net, **how: Any) -> dict[str, Tensor]:
    hesscale.backward(loss_of(net), **how)
    return {name: p.curvature for name, p in net.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def estimated(method: str, net: Net) -> dict[str, Tensor]:
    params = ["last.weight", "a.weight"] if method == "kfac" else None
    batch = X, Y
    return hesscale.estimate(method, net, F.cross_entropy, batch, params=params, samples=2, generator=generator())


def by_source(source: Callable[..., None], net: Net) -> dict[str, Tensor]:
    with twice_differentiable(net):
        source(loss_of(net), [*net.parameters()], generator=generator())
    return {name: p.curvature for name, p in net.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def exact(net: Net) -> dict[str, Tensor]:
    named = {name: p for name, p in net.named_parameters() if not name.startswith("b.")}
    with twice_differentiable(net):
        return dict(zip(named, exact_diagonal(loss_of(net), [*named.values()]), strict=True))


WAYS: dict[str, Callable[[Net], dict[str, Tensor]]] = {
    "hesscale": backward,
    "hesscale_gn": functools.partial(backward, method="hesscale_gn"),
    "bl89": functools.partial(backward, method="bl89"),
    "exact": functools.partial(backward, missing="exact"),
    "columns": lambda net: backward(net, rank=1, generator=generator()),
    "all columns": functools.partial(backward, rank="full"),
    **{f"estimate {method}": functools.partial(estimated, method) for method in ESTIMATORS},
    "Hutchinson's source": functools.partial(by_source, hutchinson_backward),
    "the sampled source": functools.partial(by_source, sampled_gauss_newton_backward),
    "exact_diagonal": exact,
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_changes_nothing_and_runs_once_more(way: str, kind: str, part: Any) -> None:
    net, other = (Net(part, how) for how in KINDS[kind])
    found, expected = WAYS[way](net), WAYS[way](other)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert net.runs == {"offloaded": 1, "nested": 3}.get(kind, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype: torch.dtype, kind: str) -> None:
    """What a write into a slice has saved is out of sight, and recomputed as it was."""

    def ends_in_a_write(net: Net, x: Tensor) -> Tensor:
        return _scaled(net.a(x).mul(1.5), net.k)

    found, expected = (backward(Net(ends_in_a_write, how).to(dtype)) for how in KINDS[kind])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "nested", "offloaded"])  # torch lets selective ones be read by one pass
def test_retained_graphs(kind: str) -> None:
    found = []
    for net in (Net(written, how) for how in KINDS[kind]):
        loss = loss_of(net)
        first, second = (hesscale.diagonal(loss, net, retain_graph=True) for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        hesscale.backward(loss)
        found.append(net.a.weight.curvature)  # type: ignore[union-attr]
        torch.testing.assert_close(found[-1], first["a.weight"], rtol=0, atol=0)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("missing", ["exact", "sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_functions_without_a_rule(kind: str, missing: Any) -> None:
    def cubed(net: Net, x: Tensor) -> Tensor:
        h = Twice.apply(net.a(x), 3)
        h[:, :2] *= net.k
        return h  # type: ignore[no-any-return]

    nets = (Net(cubed, how) for how in KINDS[kind])
    found, expected = (backward(net, missing=missing, generator=generator()) for net in nets)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_within_a_group_of_the_users() -> None:
    net, other = Net(written, plain), Net(written, KINDS["plain"][1])
    loss = loss_of(net)
    with GraphExecGroup():
        found = hesscale.diagonal(loss, net)
    torch.testing.assert_close(found, hesscale.diagonal(loss_of(other), other), rtol=1e-10, atol=1e-10)
    assert net.runs == 2


@pytest.mark.parametrize("method", ["hesscale", "hessian", "ggn", "hutchinson", "ggn_mc", "squared_gradient"])
def test_a_forward_pass_that_runs_backward_within(method: str) -> None:
    """It recomputes what was saved by then, which is half of the checkpoint."""

    def weighed(net: Net, x: Tensor) -> Tensor:
        h = net.a(x).tanh()
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(h.sin().sum(), h, retain_graph=True)
            h = h * slope.detach()
        return h.cos()

    found, expected = (estimated(method, Net(weighed, how)) for how in (to_the_end, KINDS["plain"][1]))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_passes_that_are_not_ours_forget() -> None:
    """Each tensor is gone once it was read; a Function that reads twice is torch's affair."""
    hesscale.backward(loss_of(Net(meeting, plain)))
    x = torch.ones(3, requires_grad=True)
    y = plain(torch.exp, x)
    node: Any = y.grad_fn
    node.register_prehook(lambda grads: tuple(grad * node._saved_result for grad in grads))
    with pytest.raises(RuntimeError, match="already unpacked once"):
        y.sum().backward()


def test_nobody_is_remembered() -> None:
    before = len(recomputing._KEEPING)
    net = Net(meeting, plain)
    backward(net)
    estimated("ggn_mc", net)
    gc.collect()
    assert len(recomputing._KEEPING) == before
