"""Recurrent layers: the fused LSTM against its own cell steps, and all of them on real shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hesscale

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
