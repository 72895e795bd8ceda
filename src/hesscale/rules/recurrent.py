"""Fused recurrent kernels: their time steps are computed again in plain operations, and walked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .families import Rebuilt
from .table import register

State = tuple[Tensor, ...]
Weights = Sequence[Tensor | None]  # of input and hidden state, then their biases if there are any


def lstm_cell(x: Tensor, state: State, weights: Weights) -> State:
    """One step of an LSTM: the new hidden and cell state."""
    hidden, cell = state
    w_x, w_h, b_x, b_h = (*weights, None, None)[:4]
    gates = F.linear(x, w_x, b_x) + F.linear(hidden, w_h, b_h)  # type: ignore[arg-type]
    entry, forget, content, exit_ = gates.chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(entry) * torch.tanh(content)
    return torch.sigmoid(exit_) * torch.tanh(cell), cell


def gru_cell(x: Tensor, state: State, weights: Weights) -> State:
    """One step of a GRU: the new hidden state."""
    (hidden,) = state
    w_x, w_h, b_x, b_h = (*weights, None, None)[:4]
    from_x, from_h = F.linear(x, w_x, b_x), F.linear(hidden, w_h, b_h)  # type: ignore[arg-type]
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, -1), from_h.chunk(3, -1)
    update = torch.sigmoid(z_x + z_h)
    new = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
    return (new + update * (hidden - new),)


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, State, Weights], State]:
    def cell(x: Tensor, state: State, weights: Weights) -> State:
        w_x, w_h, b_x, b_h = (*weights, None, None)[:4]
        return (activation(F.linear(x, w_x, b_x) + F.linear(state[0], w_h, b_h)),)  # type: ignore[arg-type]

    return cell


_CELLS = (_plain_cell(torch.relu), _plain_cell(torch.tanh), lstm_cell, gru_cell)  # by the mode of mkldnn and cuDNN


def _run(mode: int, steps: Sequence[Tensor], state: State, weights: Weights, reverse: bool) -> tuple[Tensor, State]:
    """All outputs of one layer in one direction, and its last state."""
    outputs: list[Tensor] = []
    for step in reversed(steps) if reverse else steps:
        state = _CELLS[mode](step, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def mkldnn_layer(node: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """One layer in one direction: outputs, last hidden and last cell state."""
    names = ("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_")
    leaves = [_leaf(getattr(node, f"_saved_{name}")) for name in names]
    x, *weights = leaves[:5]
    state = tuple(leaf.reshape(x.shape[1], -1) for leaf in leaves[5:])
    weights = weights if node._saved_has_biases else weights[:2]
    outputs, last = _run(node._saved_mode, x.unbind(0), state, weights, node._saved_reverse)
    pairs = zip(last, (node._saved_hx_, node._saved_cx_), strict=True)
    return [outputs, *(tensor.reshape(like.shape) for tensor, like in pairs)], [*leaves]


def cudnn_stack(node: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """All layers and directions of cuDNN's kernel: outputs, last hidden and last cell states."""
    if node._saved_dropout and node._saved_train and node._saved_num_layers > 1:
        raise NotImplementedError("cuDNN does not say which units it dropped between layers: set dropout=0 in the RNN.")
    if len(node._saved_batch_sizes) or node._saved_proj_size:
        raise NotImplementedError("packed sequences and projections have no rule in cuDNN's kernel: disable cuDNN.")
    x = _leaf(node._saved_input)
    flat = [_leaf(weight) for weight in node._saved_weight]
    starts = [_leaf(t) for t in (node._saved_hx, node._saved_cx) if t is not None]
    directions = 2 if node._saved_bidirectional else 1
    each = node._saved_weight_stride0
    layer, lasts = x.transpose(0, 1) if node._saved_batch_first else x, []
    for depth in range(node._saved_num_layers):
        made = []
        for index in range(depth * directions, (depth + 1) * directions):
            state, weights = tuple(t[index] for t in starts), flat[index * each : (index + 1) * each]
            outputs, last = _run(node._saved_mode, layer.unbind(0), state, weights, index % directions == 1)
            made.append(outputs)
            lasts.append(last)
        layer = torch.cat(made, -1)
    ends = [torch.stack(tensors) for tensors in zip(*lasts, strict=True)]
    ends += [torch.zeros_like(ends[0])] * (2 - len(ends))  # without a cell state the kernel still returns one
    results = [layer.transpose(0, 1) if node._saved_batch_first else layer, *ends]
    return results, [x, *flat, *starts, *[None] * (2 - len(starts))]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


register(Rebuilt(mkldnn_layer), "MkldnnRnnLayerBackward0")
register(Rebuilt(cudnn_stack), "CudnnRnnBackward0")
