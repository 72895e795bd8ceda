"""Fused recurrent kernels: all gates of all steps are computed again at once, and one loop leads back through them.

With the state h_t a function of gates a_t = W x_t + U h_{t−1} + b, whose derivatives are diagonal, a step back is

    g_a = A g,    s_a = A² s + B g,    g_{t−1} = Uᵀ g_a + K g,    s_{t−1} = (U²)ᵀ s_a + K² s

for gradient and curvature together, A and B being first and second derivatives by the gates, and K that by the state
before. Weights get theirs from all steps in one product. What is dropped is what is dropped when a model is written in
single steps: the hidden units that meet again in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .families import Curvatures, Rule
from .table import register

State = tuple[Tensor, ...]  # the hidden state, and the cell state of an LSTM
Weights = Sequence[Tensor]  # of input and hidden state, then their biases if there are any

_CUDNN = "CudnnRnnBackward0"
_ELEMENTS = 2**20
"""Gradients of single examples are made this many numbers at a time."""
_CACHED = 2**15
"""Derivatives by a gate are made this many numbers at a time."""


def _four(weights: Weights) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return (*weights, None, None)[:4]  # type: ignore[return-value]


class Gates(NamedTuple):
    """Derivatives of some steps of a layer, [steps, examples, gates, units], or [steps, examples, units] of its state.

    By the last gate of an LSTM they are those of its hidden state, by the others those of its cell state.
    """

    slopes: Tensor
    bends: Tensor  # second derivatives
    kept: Tensor | None = None  # by the state before, beside what goes through gates
    reach: tuple[Tensor, Tensor] | None = None  # of an LSTM's hidden state by its cell state, first and second


def _lstm_step(from_x: Tensor, from_h: Tensor, state: State) -> State:
    entry, forget, content, leave = (from_x + from_h).chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(entry) * torch.tanh(content)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


def _lstm_parts(x: Tensor, before: Tensor, after: Tensor, start: State, weights: Weights) -> State:
    """h = o tanh(c),  c = f c₋ + i n:  all of i, f, n, o together, c₋ and c."""
    w_x, w_h, b_x, b_h = _four(weights)
    from_x = F.linear(x.flatten(0, 1), w_x, None if b_x is None or b_h is None else b_x + b_h)
    gates = from_x.addmm_(before.flatten(0, 1), w_h.mT).view(*before.shape[:2], 4, -1)
    gates[:, :, :2].sigmoid_()
    gates[:, :, 2].tanh_()
    gates[:, :, 3].sigmoid_()
    cells = [start[1]]
    for entry, forget, content, _ in (step.unbind(1) for step in gates.unbind(0)):
        cells.append(torch.addcmul(entry * content, forget, cells[-1]))
    every = torch.stack(cells)
    return gates, every[:-1], every[1:]


def _lstm_gates(gates: Tensor, before: Tensor, cell: Tensor) -> Gates:
    entry, forget, content, leave = gates.unbind(2)
    seen = torch.tanh(cell)
    slopes = (1 - gates).mul_(gates)  # σ' = σ(1 − σ), but tanh' = 1 − tanh²
    slopes[:, :, 2] = 1 - content * content
    ratios = torch.rsub(gates, 1, alpha=2)  # σ''/σ' = 1 − 2σ, but tanh''/tanh' = −2 tanh
    ratios[:, :, 2] -= 1
    for index, factor in enumerate((content, before, entry, seen)):
        slopes[:, :, index] *= factor
    reach = leave * (1 - seen * seen)
    return Gates(slopes, ratios.mul_(slopes), forget, (reach, -2 * seen * reach))


def _gru_parts(x: Tensor, before: Tensor, after: Tensor, start: State, weights: Weights) -> State:
    """h = (1 − z) n + z h₋,  n = tanh(n_x + r n_h):  r, z, n, n_h and h₋."""
    w_x, w_h, b_x, b_h = _four(weights)
    return *_gru_activations(F.linear(x, w_x, b_x), F.linear(before, w_h, b_h)), before


def _gru_activations(from_x: Tensor, from_h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, -1), from_h.chunk(3, -1)
    reset = torch.sigmoid(r_x + r_h)
    return reset, torch.sigmoid(z_x + z_h), torch.tanh(n_x + reset * n_h), n_h


def _gru_step(from_x: Tensor, from_h: Tensor, state: State) -> State:
    _, update, new, _ = _gru_activations(from_x, from_h)
    return (new + update * (state[0] - new),)


def _gru_gates(reset: Tensor, update: Tensor, new: Tensor, n_h: Tensor, before: Tensor) -> Gates:
    """By r, z, n_h and n_x."""
    first = (1 - update) * (1 - new * new)
    second = -2 * new * first
    by_reset = n_h * reset * (1 - reset)
    by_update = (before - new) * update * (1 - update)
    slopes = torch.stack((first * by_reset, by_update, first * reset, first), 2)
    bends = (
        second * by_reset * by_reset + first * by_reset * (1 - 2 * reset),
        by_update * (1 - 2 * update),
        second * reset * reset,
        second,
    )
    return Gates(slopes, torch.stack(bends, 2), update)


def _after(x: Tensor, before: Tensor, after: Tensor, start: State, weights: Weights) -> State:
    return (after,)


def _tanh_gates(after: Tensor) -> Gates:
    slopes = (1 - after * after).unsqueeze(2)
    return Gates(slopes, -2 * after.unsqueeze(2) * slopes)


def _relu_gates(after: Tensor) -> Gates:
    slopes = (after > 0).to(after.dtype).unsqueeze(2)
    return Gates(slopes, torch.zeros_like(slopes))


class Cell(NamedTuple):
    """A kind of layer."""

    step: Callable[[Tensor, Tensor, State], State]
    parts: Callable[[Tensor, Tensor, Tensor, State, Weights], State]  # what is kept of all steps, hidden states known
    gates: Callable[..., Gates]  # of some steps, from their parts
    width: int  # how many gates


_CELLS = (  # by the mode of mkldnn and cuDNN
    Cell(lambda from_x, from_h, state: (torch.relu(from_x + from_h),), _after, _relu_gates, 1),
    Cell(lambda from_x, from_h, state: (torch.tanh(from_x + from_h),), _after, _tanh_gates, 1),
    Cell(_lstm_step, _lstm_parts, _lstm_gates, 4),
    Cell(_gru_step, _gru_parts, _gru_gates, 4),
)


@dataclass(frozen=True)
class Layers:
    """What a node has computed: layers one upon the other, one or two directions each. Tensors begin with time."""

    mode: int
    x: Tensor
    weights: Sequence[Weights]  # by layer and direction, as are the states
    starts: Sequence[State]
    backward: Sequence[bool]  # for each of the directions
    outputs: Tensor | None = None  # of the only layer, if the node has saved them
    slots: int = 4  # inputs of the node for each of ``weights``

    @property
    def units(self) -> int:
        """Of the hidden state."""
        return self.starts[0][0].shape[-1]


class Tape(NamedTuple):
    """One layer in one direction, in the order of its steps."""

    x: Tensor
    before: Tensor  # hidden states before each step
    after: Tensor
    weights: Weights
    parts: State
    cell: Cell


def _tapes(layers: Layers) -> list[list[Tape]]:
    """By layer, by direction."""
    directions = len(layers.backward)
    made: list[list[Tape]] = []
    x = layers.x
    for first in range(0, len(layers.weights), directions):
        if made:
            x = torch.cat([_turned(t.after, back) for t, back in zip(made[-1], layers.backward, strict=True)], -1)
        made.append([_tape(layers, x, first + index) for index in range(directions)])
    return made


def _turned(x: Tensor, backward: bool) -> Tensor:
    return x.flip(-3) if backward else x


def _tape(layers: Layers, x: Tensor, index: int) -> Tape:
    cell, backward = _CELLS[layers.mode], layers.backward[index % len(layers.backward)]
    weights, start = layers.weights[index], layers.starts[index]
    x = _turned(x, backward)
    after = _states(cell, x, start, weights) if layers.outputs is None else _turned(layers.outputs, backward)
    before = torch.cat((start[0].unsqueeze(0), after[:-1]))
    return Tape(x, before, after, weights, cell.parts(x, before, after, start, weights), cell)


def _states(cell: Cell, x: Tensor, state: State, weights: Weights) -> Tensor:
    """The hidden states after each step."""
    w_x, w_h, b_x, b_h = _four(weights)
    states: list[Tensor] = []
    for from_x in F.linear(x, w_x, b_x).unbind(0):
        state = cell.step(from_x, F.linear(state[0], w_h, b_h), state)
        states.append(state[0])
    return torch.stack(states)


Powers = tuple[int, ...]
"""What is carried: a gradient as 1, by derivatives, curvature as 2, by their squares; tensors have a row for each."""


def _rows(x: Tensor, powers: Powers) -> Tensor:
    return torch.stack([x if power == 1 else x * x for power in powers])


def _back(tape: Tape, y: Tensor, ends: Sequence[Tensor], powers: Powers, *, every: bool) -> tuple[Tensor, list[Tensor]]:
    """[rows, steps, examples, gates, units] at the gates, and the rows of the first state.

    At the gates there is the last row alone, unless ``every`` row is wanted.
    """
    both, weight = len(powers) == 2, _rows(tape.weights[1], powers)
    used = len(tape.weights[1]) // tape.before.shape[-1]  # gates that read the hidden state
    coming = [torch.zeros_like(ends[0]), *y.unbind(1)]
    hidden, cell = ends[0] + coming.pop(), ends[-1]
    found = hidden.new_empty(
        (len(powers) if every else 1, *tape.before.shape[:2], tape.cell.width, tape.before.shape[2])
    )
    for part in _some_at_once(tape):
        gates = tape.cell.gates(*(whole[part] for whole in tape.parts))
        slopes, bends = _rows(gates.slopes, powers).unbind(1), gates.bends.unbind(0)
        kept = [] if gates.kept is None else _rows(gates.kept, powers).unbind(1)
        reach = [] if gates.reach is None else _rows(gates.reach[0], powers).unbind(1)
        reach_bends = [] if gates.reach is None else gates.reach[1].unbind(0)
        for step in reversed(range(len(slopes))):
            rest, source = coming.pop(), hidden.unsqueeze(2)
            if reach:
                cell = torch.addcmul(cell, hidden, reach[step])
                if both:
                    cell[1].addcmul_(hidden[0], reach_bends[step])
                source = torch.cat((cell.unsqueeze(2).expand(-1, -1, 3, -1), source), 2)
                cell = cell * kept[step]
            elif kept:
                rest = torch.addcmul(rest, hidden, kept[step])
            at_gates = slopes[step] * source
            if both:
                at_gates[1].addcmul_(bends[step], source[0])
            found[:, part.start + step] = at_gates[-len(found) :]
            hidden = torch.baddbmm(rest, at_gates[:, :, :used].flatten(2), weight)
    return found, [hidden, cell][: len(ends)]


def _some_at_once(tape: Tape) -> Iterator[slice]:
    """The steps in parts, the last first, whose derivatives stay in a processor's cache."""
    count = max(_CACHED // max(tape.before[0].numel(), 1), 1)
    for end in range(len(tape.before), 0, -count):
        yield slice(max(end - count, 0), end)


def _of_input(at_gates: Tensor, tape: Tape) -> Tensor:
    """What a layer's input feeds: for a GRU the last gate in place of that of the hidden state."""
    if at_gates.shape[3] * at_gates.shape[4] == len(tape.weights[0]):
        return at_gates.flatten(3)
    return torch.cat((at_gates[:, :, :, :2], at_gates[:, :, :, 3:]), 3).flatten(3)


def _of_hidden(at_gates: Tensor, tape: Tape) -> Tensor:
    return at_gates.flatten(3)[..., : len(tape.weights[1])]


Leave = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(rows at the gates, [rows, steps, examples, gates · units], what the weight was multiplied by) → weight's, bias's."""


def _summed(at_gates: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Curvature: Σ s x², Σ s."""
    s = at_gates[-1].flatten(0, 1)
    flat = x.flatten(0, 1)
    return s.mT @ (flat * flat), s.sum(0)


def _squared_apart(at_gates: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_examples (Σ_steps g x)², Σ_examples (Σ_steps g)²."""
    g, x = at_gates[-1].transpose(0, 1), x.transpose(0, 1)
    count = max(_ELEMENTS // max(g.shape[-1] * x.shape[-1], 1), 1)
    total = g.new_zeros(g.shape[-1], x.shape[-1])
    for part, own in zip(g.split(count), x.split(count), strict=True):
        total += (part.mT @ own).square_().sum(0)
    return total, g.sum(1).square_().sum(0)


@dataclass(frozen=True)
class Recurrent(Rule):
    """The rule of a kernel, of which ``read(node)`` says what it has computed.

    Its inputs are the sequence, weights and biases of every layer and direction, and the first states.
    """

    read: Callable[[Any], Layers]
    exact: bool = False

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        if all(entry is None for entry in (*s, *g)):
            return (None,) * len(wanted)
        if all(entry is None for entry in g):
            return self._found(node, [s], (2,), _summed, wanted)
        return self._found(node, [g, s], (1, 2), _summed, wanted)

    def squares(self, node: Any, gradients: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        """Σ_n (J_nᵀ v_n)² at each input, from the gradients v of the outputs, where examples lie side by side."""
        found = self._found(node, [gradients], (1,), _squared_apart, wanted)
        weights = range(1, len(wanted) - 2)
        return [x if x is None or index in weights else x.square() for index, x in enumerate(found)]

    def _found(
        self,
        node: Any,
        seeds: Sequence[Curvatures],
        powers: Powers,
        leave: Leave,
        wanted: Sequence[torch.Size | None],
    ) -> Curvatures:
        layers, turned = self.read(node), is_batch_first(node)
        count, directions, units = len(layers.weights), len(layers.backward), layers.units
        steps, examples, _ = layers.x.shape
        moved = [seed if seed is None else seed.transpose(0, 1) if turned else seed for seed, *_ in seeds]
        y = _stacked(moved, layers.x, (steps, examples, directions * units))
        each = [
            _stacked([seed[1 + kind] for seed in seeds], layers.x, (count, examples, units))
            for kind in range(len(layers.starts[0]))
        ]
        weights: list[list[Tensor]] = [[]] * count
        states: list[list[Tensor]] = [[]] * count
        tapes = _tapes(layers)
        for depth in reversed(range(len(tapes))):
            below: list[Tensor] = []
            for direction, (tape, backward) in enumerate(zip(tapes[depth], layers.backward, strict=True)):
                index = depth * directions + direction
                own = _turned(y[..., direction * units : (direction + 1) * units], backward)
                at_gates, states[index] = _back(tape, own, [rows[:, index] for rows in each], powers, every=depth > 0)
                of_x, of_h = _of_input(at_gates, tape), _of_hidden(at_gates, tape)
                (w_x, b_x), (w_h, b_h) = leave(of_x, tape.x), leave(of_h, tape.before)
                weights[index] = [w_x, w_h, b_x, b_h][: layers.slots]
                if depth or wanted[0] is not None:
                    weight = _rows(tape.weights[0], powers)[-len(of_x) :]
                    below.append(_turned((of_x.flatten(1, 2) @ weight).unflatten(1, (steps, examples)), backward))
            y = sum(below[1:], below[0]) if below else y
        x = None if wanted[0] is None else y[-1].transpose(0, 1) if turned else y[-1]
        firsts = [torch.stack([rows[-1] for rows in kind]) for kind in zip(*states, strict=True)]
        pairs = zip_longest([x, *chain.from_iterable(weights), *firsts], wanted)
        return [None if shape is None or entry is None else entry.reshape(shape) for entry, shape in pairs]

    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        return False


def _stacked(seeds: Sequence[Tensor | None], like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One row for each seed, zeros where it is missing."""
    return torch.stack([like.new_zeros(shape) if seed is None else seed.reshape(shape) for seed in seeds])


def mkldnn_layer(node: Any) -> Layers:
    """One layer in one direction. oneDNN fuses LSTMs only."""
    weights = [getattr(node, f"_saved_weight{index}") for index in range(4 if node._saved_has_biases else 2)]
    x = node._saved_input
    start = tuple(t.reshape(x.shape[1], -1) for t in (node._saved_hx_, node._saved_cx_))
    return Layers(node._saved_mode, x, [weights], [start], [node._saved_reverse], node._saved_result0)


def is_batch_first(node: Any) -> bool:
    """Whether sequences of the kernel begin with the examples. cuDNN's may."""
    return node.name() == _CUDNN and bool(node._saved_batch_first)  # oneDNN's has the flag, but what it gets is turned


def cudnn_stack(node: Any) -> Layers:
    """All layers and directions of cuDNN's kernel."""
    if node._saved_dropout and node._saved_train and node._saved_num_layers > 1:
        raise NotImplementedError("cuDNN does not say which units it dropped between layers: set dropout=0 in the RNN.")
    if len(node._saved_batch_sizes) or node._saved_proj_size:
        raise NotImplementedError("packed sequences and projections have no rule in cuDNN's kernel: disable cuDNN.")
    x, flat, each = node._saved_input, node._saved_weight, node._saved_weight_stride0
    states = [t for t in (node._saved_hx, node._saved_cx) if t is not None]
    return Layers(
        node._saved_mode,
        x.transpose(0, 1) if is_batch_first(node) else x,
        [flat[first : first + each] for first in range(0, len(flat), each)],
        [*zip(*(t.unbind(0) for t in states), strict=True)],
        (False, True) if node._saved_bidirectional else (False,),
        slots=each,
    )


register(Recurrent(mkldnn_layer), "MkldnnRnnLayerBackward0")
register(Recurrent(cudnn_stack), _CUDNN)
