"""AdaGGNMC's curvature is Σ_n (J_nᵀ v_n)²: compared with one backward per example, at the same draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hesscale
from hesscale.columns import squares

from ..optim.small import random

N = 4


class Lambda(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], *modules: nn.Module, **params: Tensor) -> None:
        super().__init__()
        self.function, self.modules_ = forward, nn.ModuleList(modules)
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, *self.modules_, x)


def squared_error(y: Tensor) -> Tensor:
    return F.mse_loss(y, torch.zeros_like(y))


def squared_error_draw(y: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(y.shape, generator=generator, dtype=y.dtype) * math.sqrt(2 / y.numel())


def cross_entropy(y: Tensor) -> Tensor:
    return F.cross_entropy(y, torch.arange(len(y)) % y.shape[1])


def ours(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = squared_error) -> dict[str, Tensor]:
    model.zero_grad()
    hesscale.AdaGGNMC(model.parameters()).backward(loss(model(x)), generator=torch.Generator().manual_seed(5))
    return {name: p.curvature for name, p in model.named_parameters()}


def one_by_one(model: nn.Module, x: Tensor, *, groups: int | None = None) -> dict[str, Tensor]:
    """Σ over groups of examples (every example its own if None) of the group's squared gradient."""
    y = model(x)
    draw = squared_error_draw(y, torch.Generator().manual_seed(5)).detach()
    params = dict(model.named_parameters())
    found = {name: torch.zeros_like(p) for name, p in params.items()}
    for rows in torch.arange(len(y)).chunk(groups or len(y)):
        own = torch.zeros_like(draw).index_copy(0, rows, draw[rows])
        for name, g in zip(params, torch.autograd.grad(y, [*params.values()], own, retain_graph=True), strict=True):
            found[name] += g.square()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * max(t.abs().max() for t in expected.values()))


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    batch: tuple[str, ...] = ()  # parameters that get the square of the batch's gradient


def tokens(*shape: int) -> Tensor:
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(1))


def encoder(batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)


def over_time(module: nn.Module) -> nn.Module:
    """Examples are the second dimension inside."""
    return Lambda(lambda self, own, x: own(x.transpose(0, 1)).sum(0), module)


def then(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A linear layer over [N, 3, 4], a function of what it gives, and one layer more."""
    return lambda: Lambda(lambda self, own, x: function(own(x)).flatten(1).tanh(), nn.Linear(2, 4))


KEPT_APART: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda y: y.gather(1, torch.tensor([[[2, 0, 1, 1]]]).expand(N, -1, -1)),
    "index_select": lambda y: y.index_select(2, torch.tensor([3, 0])),
    "flip": lambda y: y.flip(1),
    "roll": lambda y: y.roll(1, 2),
    "cumsum": lambda y: y.cumsum(1),
    "std": lambda y: y.std(1),
    "var": lambda y: y.var((1, 2), keepdim=True),
    "norm": lambda y: torch.linalg.vector_norm(y, dim=2),
    "pad": lambda y: F.pad(y, (1, 0, 0, 2)),
    "amin": lambda y: y.amin(1),
    "min": lambda y: y.min(2)[0],
    "prod": lambda y: y.prod(1),
    "chunks of a batch in the middle": lambda y: torch.cat(y.transpose(0, 1).split(2), 0).transpose(0, 1),
    "3-d pooling": lambda y: F.avg_pool3d(y.reshape(N, 1, 3, 2, 2), 2, stride=1),
}
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "std over all": lambda y: y / y.std(),
    "rolled batch": lambda y: y + y.roll(1, 0),
    "flipped batch": lambda y: y.flip(0),
    "batch gathered": lambda y: y.gather(0, torch.arange(N).flip(0).view(N, 1, 1).expand(N, 3, 4)),
    "cumulated batch": lambda y: y.cumsum(0),
    "padded batch": lambda y: F.pad(y, (0, 0, 0, 0, 1, -1)),
}
CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), lambda: random(N, 3)),
    "no bias": Case(
        lambda: nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False)),
        lambda: random(N, 3),
    ),
    "one output": Case(lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), lambda: random(N, 3)),
    "conv2d": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 6, (2, 1), groups=2, dilation=2)
        ),
        lambda: random(N, 2, 7, 6),
    ),
    "cnn": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Dropout(0.0), nn.Flatten(), nn.Linear(8, 2)
        ),
        lambda: random(N, 1, 4, 4),
    ),
    "average pooling": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ELU(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        lambda: random(N, 1, 6, 6),
    ),
    "conv1d": Case(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, bias=False), nn.Tanh(), nn.Conv1d(3, 2, 2)), lambda: random(N, 2, 6)
    ),
    "conv3d": Case(lambda: nn.Conv3d(2, 2, 2), lambda: random(N, 2, 3, 3, 3)),
    "transposed": Case(
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1, groups=2), nn.Tanh()),
        lambda: random(N, 2, 3, 3),
    ),
    "frames": Case(
        lambda: Lambda(lambda self, conv, x: conv(x.flatten(0, 1)).reshape(N, -1), nn.Conv2d(1, 2, 2)),
        lambda: random(N, 3, 1, 3, 3),
    ),
    "sequence": Case(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)), lambda: random(N, 3, 3)
    ),
    "sequence as long as the batch": Case(
        lambda: over_time(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))), lambda: random(N, N, 3)
    ),
    "encoder": Case(lambda: encoder(True), lambda: random(N, N, 4)),
    "encoder over time": Case(lambda: over_time(encoder(False)), lambda: random(N, 3, 4)),
    "attention": Case(
        lambda: Lambda(lambda self, own, x: own(x, x, x)[0], nn.MultiheadAttention(4, 2, batch_first=True)),
        lambda: random(N, 3, 4),
    ),
    "norms": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.BatchNorm2d(4).eval(), nn.LayerNorm([4, 2, 3]), nn.RMSNorm(3)
        ),
        lambda: random(N, 1, 3, 4),
    ),
    "batch norm": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
        lambda: random(N, 3),
        batch=("0.weight", "0.bias"),
    ),
    "embedding": Case(lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), lambda: tokens(N, 6)),
    "padded embedding": Case(
        lambda: nn.Sequential(nn.Embedding(5, 3, padding_idx=2, scale_grad_by_freq=True), nn.Flatten()),
        lambda: tokens(N, 6),
    ),
    "used directly": Case(
        lambda: Lambda(
            lambda self, x: x * self.scale - self.offset + torch.cat([self.token.expand(N, -1, -1), x[:, 1:]], 1),
            scale=random(3, 1),
            offset=random(2),
            token=random(1, 1, 2),
        ),
        lambda: random(N, 3, 2),
    ),
    "prelu": Case(lambda: nn.Sequential(nn.PReLU(3), nn.Conv1d(3, 2, 2), nn.PReLU()), lambda: random(N, 3, 4)),
    "a slice": Case(lambda: Lambda(lambda self, x: x + self.table[:3], table=random(5, 2)), lambda: random(N, 3, 2)),
    "left factor": Case(
        lambda: Lambda(lambda self, own, x: (self.left @ own(x).t()).t(), nn.Linear(3, 4), left=random(2, 4)),
        lambda: random(N, 3),
        batch=("left",),
    ),
    "shared": Case(
        lambda: Lambda(
            lambda self, first, second, x: second(second(first(x)).tanh()), nn.Linear(3, 2), nn.Linear(2, 2)
        ),
        lambda: random(N, 3),
    ),
    "tied": Case(
        lambda: Lambda(lambda self, own, x: own(x).tanh() @ own.weight.t(), nn.Embedding(5, 3)), lambda: tokens(N, 6)
    ),
    "slices of one": Case(
        lambda: Lambda(lambda self, x: (x @ self.w[:3]).tanh() @ self.w[2:5].t() + self.w.sum(1)[:3], w=random(6, 2)),
        lambda: random(N, 3),
        batch=("w",),  # a sum is no view of it
    ),
    "chunks of one": Case(
        lambda: Lambda(lambda self, x: (x @ self.w.chunk(2)[0]).tanh() @ self.w.chunk(2)[1].t(), w=random(6, 2)),
        lambda: random(N, 3),
    ),
    # as many rows as examples, but these rows are no examples
    "product of weights": Case(
        lambda: Lambda(lambda self, x: x @ (self.a @ self.b), a=random(N, N), b=random(N, N)),
        lambda: random(N, N),
        batch=("a", "b"),
    ),
    "mixed rows": Case(
        lambda: Lambda(lambda self, own, x: random(N, N) @ own(x).tanh(), nn.Linear(3, 2)),
        lambda: random(N, 3),
        batch=("modules_.0.weight", "modules_.0.bias"),
    ),
    "unknown op": Case(
        lambda: Lambda(lambda self, own, x: own(x).roll(1, 0), nn.Linear(3, 2)),
        lambda: random(N, 3),
        batch=("modules_.0.weight", "modules_.0.bias"),
    ),
    "recurrent": Case(
        lambda: Lambda(lambda self, cell, head, x: head(cell(x)[0]), nn.GRU(3, 3, batch_first=True), nn.Linear(3, 2)),
        lambda: random(N, 3, 3),
    ),
    "lstm": Case(
        lambda: Lambda(lambda self, own, x: own(x)[0][:, -1], nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True)),
        lambda: random(N, 3, 3),
    ),
    "convolution used twice": Case(
        lambda: Lambda(lambda self, conv, x: conv(conv(x).tanh()).flatten(1), nn.Conv2d(2, 2, 3, padding=1)),
        lambda: random(N, 2, 4, 4),
    ),
}

CASES |= {name: Case(then(function), lambda: random(N, 3, 2)) for name, function in KEPT_APART.items()}
CASES |= {
    name: Case(then(function), lambda: random(N, 3, 2), batch=("modules_.0.weight", "modules_.0.bias"))
    for name, function in MIXED.items()
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = CASES[name].model().double()
    for seed, p in enumerate(model.parameters()):
        p.data.copy_(0.7 * random(*p.shape, seed=seed))
    return model, CASES[name].x()


@pytest.mark.parametrize("name", CASES)
def test_squares_are_summed_example_by_example(name: str) -> None:
    model, x = made(name)
    expected = one_by_one(model, x)
    batch = one_by_one(model, x, groups=1)
    assert_same(ours(model, x), expected | {name: batch[name] for name in CASES[name].batch})


@pytest.mark.parametrize("name", ["conv2d", "transposed", "sequence", "tied", "shared", "recurrent"])
def test_gradients_of_examples_are_made_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "_ELEMENTS", 50)
    model, x = made(name)
    assert_same(ours(model, x), one_by_one(model, x))


def test_tokens_are_examples_until_attention_mixes_them() -> None:
    """Then sequences are; already at its last layer, since it works on tokens in another order."""

    def forward(self: nn.Module, table: nn.Module, layer: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
        return head(layer(table(x))).flatten(0, 1)

    torch.manual_seed(0)
    model = Lambda(forward, nn.Embedding(5, 4), encoder(True), nn.Linear(4, 3)).double()
    x = tokens(N, 3)
    apart, sequences = one_by_one(model, x), one_by_one(model, x, groups=N)
    after = ("modules_.2", "modules_.1.linear", "modules_.1.norm")
    assert_same(ours(model, x), {n: (apart if n.startswith(after) else sequences)[n] for n in apart})


@pytest.mark.parametrize("of", ["outputs", "last state", "both"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_fused_recurrent_kernel_is_taken_apart(of: str, layers: int) -> None:
    """In single precision on a CPU an LSTM is one node: its steps are computed again, as the walk does."""

    def forward(self: nn.Module, cell: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
        y, (state, _) = cell(x)
        return head({"outputs": y.mean(1), "last state": state[-1], "both": y.mean(1) + state[-1]}[of])

    torch.manual_seed(0)
    model = Lambda(forward, nn.LSTM(3, 4, layers, batch_first=True), nn.Linear(4, 2))
    x = random(N, 5, 3).float()
    if "MkldnnRnnLayerBackward0" not in hesscale.check(squared_error(model(x))).approximated:
        pytest.skip("no fused kernel here")
    found, expected = ours(model, x), one_by_one(model, x)
    for name, own in expected.items():
        torch.testing.assert_close(found[name], own, rtol=1e-4, atol=1e-5 * float(own.max()))


def test_two_heads_share_their_examples() -> None:
    model, x = made("mlp")

    def loss(y: Tensor) -> Tensor:
        return squared_error(y[:, :1]) / 2 + squared_error(y[:, 1:]) / 2

    found = ours(model, x, loss)
    y = model(x)
    generator = torch.Generator().manual_seed(5)
    halves = [squared_error_draw(half, generator) / math.sqrt(2) for half in (y[:, :1], y[:, 1:])]
    for draws in (halves, halves[::-1]):  # whichever head was drawn for first
        draw = torch.cat(draws, 1).detach()
        rows = [torch.autograd.grad(y[n], model[0].weight, draw[n], retain_graph=True)[0] for n in range(N)]
        if torch.allclose(torch.stack(rows).square().sum(0), found["0.weight"], rtol=1e-10):
            return
    pytest.fail("neither order of draws gives this curvature")


def test_checkpoints_may_be_read() -> None:
    model, x = made("mlp")
    again = Lambda(lambda self, own, x: checkpoint(own, x, use_reentrant=False), model)
    plain = ours(model, x)
    assert_same(ours(again, x), {f"modules_.0.{name}": t for name, t in plain.items()})


def test_half_precision_is_squared_in_single() -> None:
    model, x = made("mlp")
    model, x = model.float(), x.float()
    plain = ours(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(model, x)
    for name, curvature in found.items():
        assert curvature.dtype is torch.float32
        torch.testing.assert_close(curvature, plain[name], rtol=0.05, atol=0.05 * float(plain[name].max()))
