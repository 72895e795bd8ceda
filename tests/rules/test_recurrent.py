"""Recurrent layers: fused kernels against their own steps, and all of them on real shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hesscale
from hesscale.rules import RULES, recurrent
from hesscale.rules.recurrent import Recurrent

from .case import constant, randn
from .test_rules import node_names

FUSED = "MkldnnRnnLayerBackward0"


def unrolled(layer: nn.LSTM, x: Tensor, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What nn.LSTM computes, one cell at a time, layers and directions in its order."""
    directions = 2 if layer.bidirectional else 1
    weights = layer.all_weights
    lasts: list[tuple[Tensor, Tensor]] = []
    for depth in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            index = depth * directions + direction
            hidden, cell = states[0][index], states[1][index]
            steps = list(x.unbind(0))
            steps = steps[::-1] if direction else steps
            made = []
            for step in steps:
                hidden, cell = torch.lstm_cell(step, (hidden, cell), *weights[index])
                made.append(hidden)
            outputs.append(torch.stack(made[::-1] if direction else made))
            lasts.append((hidden, cell))
        x = torch.cat(outputs, -1)
    return x, torch.stack([h for h, _ in lasts]), torch.stack([c for _, c in lasts])


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True}, {"bias": False}],
    ids=["plain", "both ways", "deep", "no bias"],
)
def test_fused_lstm_is_its_cells(options: dict[str, Any], method: str) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 5, **options)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    x = torch.randn(6, 3, 4, requires_grad=True)
    states = torch.randn(count, 3, 5, requires_grad=True), torch.randn(count, 3, 5, requires_grad=True)
    wanted = [x, *states, *layer.parameters()]

    fused, (hidden, cell) = layer(x, states)
    assert FUSED in node_names(fused)
    found = hesscale.diagonal(loss_of(fused, hidden, cell), wanted, method=method)
    expected = hesscale.diagonal(loss_of(*unrolled(layer, x, states)), wanted, method=method)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-5 * float(theirs.abs().max()))


def loss_of(outputs: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
    return outputs.square().mean() + hidden.exp().mean() + cell.square().mean()


def made_in_double(x: Tensor, layer: nn.LSTM, states: tuple[Tensor, Tensor], *, backward: bool) -> tuple[Any, Tensor]:
    """A node of the fused kernel, which knows single precision only, as it would be in double, and its output."""
    outputs, _ = layer(x.flip(0) if backward else x, tuple(state.unsqueeze(0) for state in states))
    outputs = outputs.flip(0) if backward else outputs
    weights = (*layer.parameters(), *layer.parameters())[:4]
    saved = {f"weight{index}": constant(weight) for index, weight in enumerate(weights)}
    saved |= {"input": constant(x), "hx_": constant(states[0]), "cx_": constant(states[1]), "mode": 2}
    saved |= {"has_biases": layer.bias, "reverse": backward, "result0": constant(outputs)}
    attributes = {f"_saved_{name}": value for name, value in saved.items()}
    return SimpleNamespace(name=lambda: FUSED, **attributes), outputs


SEEDS = ((True, True, True), (True, False, False), (False, True, False), (False, False, False))
"""Which of the outputs, the last hidden and the last cell state are given a seed."""


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("seeded", SEEDS)
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("at_once", [2**15, 1])
def test_the_rule_is_the_steps_in_double(
    bias: bool, backward: bool, seeded: tuple[bool, ...], residual: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "_CACHED", at_once)
    torch.manual_seed(0)
    layer = nn.LSTM(4, 5, bias=bias).double()
    x, states = randn(6, 3, 4), (randn(3, 5, seed=1), randn(3, 5, seed=2))
    inputs = [x, *layer.parameters(), *states]
    made, _ = made_in_double(x, layer, states, backward=backward)

    shapes = (6, 3, 5), (3, 5), (3, 5)
    s = [constant(randn(*shape, seed=index)) for index, shape in enumerate(shapes)]
    g = [constant(randn(*shape, seed=3 + index)) for index, shape in enumerate(shapes)]
    s_given = [seed if given else None for seed, given in zip(s, seeded, strict=True)]
    g_given = g if residual else [None] * 3
    wanted = [
        x.shape,
        *[p.shape for p in layer.parameters()],
        *([] if bias else [None] * 2),
        *[t.shape for t in states],
    ]
    found = RULES[FUSED](made, s_given, g_given, wanted)

    outputs, (hidden, cell) = layer(x.flip(0) if backward else x, tuple(state.unsqueeze(0) for state in states))
    y = torch.cat([(outputs.flip(0) if backward else outputs).flatten(), hidden.flatten(), cell.flatten()])
    zeros = [torch.zeros_like(t) for t in s]
    curvature = torch.cat([(t if given else zero).flatten() for t, zero, given in zip(s, zeros, seeded, strict=True)])
    gradient = torch.cat([t.flatten() for t in (g if residual else zeros)])
    expected = hesscale.diagonal(y, inputs, gradient, curvature)
    if not residual and not any(seeded):
        assert all(entry is None for entry in found)
        return
    for ours, theirs in zip((t for t in found if t is not None), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def calls(steps: int) -> list[str]:
    torch.manual_seed(0)
    loss = nn.LSTM(4, 5)(torch.randn(steps, 3, 4))[0].square().mean()
    with Calls() as counted:
        hesscale.backward(loss)
    return counted.names


def test_a_step_is_one_product_and_a_few_small_operations() -> None:
    """For gradient and curvature of all gates at once; what is computed without a loop does not count."""
    few, twice, four_times = (calls(steps) for steps in (10, 20, 40))
    views = {"unsqueeze", "select", "slice", "view", "expand", "unbind", "_unsafe_view"}
    small = [sum(name not in views for name in names) for names in (few, twice, four_times)]
    assert four_times.count("baddbmm") - twice.count("baddbmm") == 20
    assert small[2] - small[1] == 2 * (small[1] - small[0]) <= 15 * 20
    assert all(names.count("mm") == few.count("mm") <= 4 for names in (twice, four_times))


@pytest.mark.parametrize("read", ["tokens", "mean"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_columns_through_a_fused_layer_are_those_of_its_steps(batch_first: bool, read: str) -> None:
    """Also where every token is an example of its own, which the layer mixes."""

    def found(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        torch.manual_seed(0)
        layer = nn.LSTM(4, 3, batch_first=batch_first).to(dtype)
        x = randn(6, 7, 4).detach().to(dtype)
        y = layer(x if batch_first else x.transpose(0, 1))[0]
        y = y.flatten(0, 1) if read == "tokens" else y.mean(1 if batch_first else 0)
        loss = F.cross_entropy(y, torch.arange(len(y)) % 3)
        return hesscale.diagonal(loss, [*layer.parameters()], rank=2, generator=torch.Generator().manual_seed(0))

    for ours, theirs in zip(found(torch.float32), found(torch.float64), strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_examples_of_a_fused_layer_are_squared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES[FUSED]
    assert isinstance(rule, Recurrent)
    layer = nn.LSTM(4, 5).double()
    x, states = randn(6, 3, 4), (randn(3, 5, seed=1), randn(3, 5, seed=2))
    made, outputs = made_in_double(x, layer, states, backward=False)
    inputs = [x, *layer.parameters(), *states]
    shapes = [tensor.shape for tensor in inputs]
    v = randn(*outputs.shape, seed=3).detach()
    whole = rule.squares(made, [v, None, None], shapes)
    monkeypatch.setattr(recurrent, "_ELEMENTS", 1)
    parts = rule.squares(made, [v, None, None], shapes)
    each = [torch.zeros_like(tensor) for tensor in inputs]
    for example in range(3):
        own = torch.zeros_like(v)
        own[:, example] = v[:, example]
        gradients = torch.autograd.grad(outputs, inputs, own, retain_graph=True)
        each = [total + gradient.square() for total, gradient in zip(each, gradients, strict=True)]
    torch.testing.assert_close(tuple(whole), tuple(each), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(tuple(parts), tuple(each), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_pass_can_be_traced(kind: Any) -> None:
    """Through a fused layer, and through steps with regions."""
    torch.manual_seed(0)
    layer = kind(4, 5)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> tuple[Tensor | None, ...]:
        outputs, _ = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))
        return hesscale.diagonal((outputs * torch.sigmoid(outputs * outputs)).mean(), weights)

    x, other = torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    traced = make_fx(run, tracing_mode="fake")(x, *layer.parameters())
    torch.testing.assert_close(traced(other, *layer.parameters()), run(other, *layer.parameters()))


def test_a_fused_layer_inside_a_checkpoint() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(4, 5, 2), torch.randn(6, 3, 4, requires_grad=True)
    wanted = [x, *layer.parameters()]
    plain = hesscale.diagonal(layer(x)[0].square().mean(), wanted)
    again = hesscale.diagonal(checkpoint(lambda x: layer(x)[0], x, use_reentrant=False).square().mean(), wanted)
    torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_run(kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = kind(4, 5, 2, bidirectional=True, dropout=0.2, batch_first=True).to(dtype)
    outputs, _ = layer(torch.randn(3, 6, 4, dtype=dtype))
    hesscale.backward(outputs.square().mean())
    assert all(torch.isfinite(p.curvature).all() for p in layer.parameters())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences_run(kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(4, 5)
    outputs, _ = layer(pack_padded_sequence(torch.randn(6, 3, 4, requires_grad=True), [6, 4, 2]))
    hesscale.backward(pad_packed_sequence(outputs)[0].square().mean())
    assert all(torch.isfinite(p.curvature).all() for p in layer.parameters())


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_run(kind: Any) -> None:
    torch.manual_seed(0)
    cell = kind(4, 5)
    outputs = cell(torch.randn(3, 4))
    hesscale.backward((outputs[0] if isinstance(outputs, tuple) else outputs).square().mean())
    assert all(torch.isfinite(p.curvature).all() for p in cell.parameters())
