"""The one table of likelihoods: nodes whose second derivatives at their predictions are known as whole matrices.

A loss is Σ_r L_r over rows r (examples, or positions of them), linear in these nodes. The Hessian of L_r at the
predictions of row r is  a_r (diag q − qqᵀ)  for log-softmax, diagonal for all others. It is drawn from for GGN-MC,
and taken apart into columns, Σ ± uuᵀ, for ``rank=``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fast.chunking import by_rows
from ..graph import Edge, Graph
from ..rules import RULES
from ..rules.calculus import View, sigmoid_slope, widened
from ..rules.families import Elementwise, Rule, Selection, signed
from ..rules.probabilities import complement, spread
from ..wiring import Wiring
from .batch_layout import Examples, Layout, along_first, rule_of
from .eigenpairs import leading_pairs

FULL = -1
"""The rank of ``rank="full"``: all columns there are."""

Column = tuple[Tensor, Tensor]
"""u [rows, entries] and the sign [rows] that uuᵀ counts with."""


class Curvature(ABC):
    """The Hessian of a loss at the predictions, as one block [entries, entries] for each of its rows."""

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Random v [count, rows, entries] with E[vvᵀ] = the block of each row; an error if one is not positive."""

    @abstractmethod
    def columns(self, rank: int) -> Iterator[Column]:
        """The leading eigenvectors of every block, each times the root of its eigenvalue; one at a time."""

    @abstractmethod
    def diagonal(self) -> tuple[Tensor, Tensor]:
        """The blocks' diagonals [rows, entries], as magnitudes in memory of their own and signs to go with them."""


@dataclass(frozen=True)
class Categorical(Curvature):
    """a (diag q − qqᵀ), q [rows, classes] the probabilities and a [rows] the weight of a row."""

    q: Tensor
    a: Tensor

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """√a (q − onehot(k)), k ~ q."""
        drawn = torch.multinomial(_near(self.q, generator), count, replacement=True, generator=generator)
        drawn = drawn.T.unsqueeze(-1).to(self.q.device)
        one_hot = self.q.new_zeros(count, *self.q.shape).scatter_(-1, drawn, 1.0)
        return (self.q - one_hot) * _root(self.a).unsqueeze(-1)

    def columns(self, rank: int) -> Iterator[Column]:
        """Those of the secular equation, or for all of them √(a q_k) (onehot(k) − q), whose squares add up exactly."""
        scale, sign = self.a.abs().sqrt().unsqueeze(-1), self.a.sign()
        if rank != FULL and rank < self.q.shape[-1] - 1:
            for u in leading_pairs(self.q, rank):
                yield u.mul_(scale), sign
            return
        others = complement(self.q, -1)
        for k in range(self.q.shape[-1]):
            u = self.q.neg()
            u[:, k] = others[:, k]
            yield u.mul_(self.q[:, k : k + 1].sqrt()).mul_(scale), sign

    def diagonal(self) -> tuple[Tensor, Tensor]:
        weight = self.a.abs().unsqueeze(-1)
        (magnitude,) = by_rows(lambda q, a: (spread(q, -1).mul_(a),), self.q, weight)
        assert magnitude is not None
        return magnitude, self.a.sign().unsqueeze(-1)


@dataclass(frozen=True)
class Diagonal(Curvature):
    """diag h, h [rows, entries]; ``noise`` is what it is drawn with, E[noise²] = 1."""

    h: Tensor
    noise: Callable[[int, torch.Generator | None], Tensor]

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """√h times noise."""
        return _root(self.h) * self.noise(count, generator)

    def columns(self, rank: int) -> Iterator[Column]:
        """The axes, those of the largest |h| first."""
        count = self.h.shape[-1] if rank == FULL else min(rank, self.h.shape[-1])
        places = self.h.abs().topk(count, -1).indices
        for j in range(count):
            own = places[:, j : j + 1]
            h = self.h.gather(-1, own)
            yield torch.zeros_like(self.h).scatter_(-1, own, h.abs().sqrt()), h.sign().squeeze(-1)

    def diagonal(self) -> tuple[Tensor, Tensor]:
        return self.h.abs(), self.h.sign()


def _near(q: Tensor, generator: torch.Generator | None) -> Tensor:
    """Where the generator lives."""
    return q if generator is None else q.to(generator.device)


def _root(weight: Tensor) -> Tensor:
    if bool((weight < 0).any()):
        raise ValueError("the loss is a likelihood with a negative weight: its Gauss-Newton matrix has no root")
    return weight.sqrt()


class Likelihood(ABC):
    """A term of a loss as GGN-MC sees it: predictions, and something to draw at them."""

    node: Any

    @property
    def nodes(self) -> list[Any]:
        """The operations that it consists of, all of equal weight in the loss."""
        return [self.node]

    @property
    @abstractmethod
    def edges(self) -> list[Edge]:
        """The predictions."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Where the examples lie in the predictions."""

    @abstractmethod
    def draws(self, g: Tensor, count: int, generator: torch.Generator | None) -> list[Tensor]:
        """For each of the predictions [count, *shape]; E[vvᵀ] is the Gauss-Newton block, if g arrives at the node."""


@dataclass(frozen=True)
class Blocks(Likelihood):
    """A node of the loss with a known curvature, and how the rows of that [rows, entries] lie in its predictions."""

    node: Any
    inputs: tuple[tuple[int, int], ...]  # the predictions' numbers among the node's inputs, each with its sign
    curvature: Callable[[Any, Tensor, Blocks], Curvature]  # of the node and the gradient at its output
    shape: torch.Size  # of the predictions
    dim: int | None  # which of their dimensions the entries of a row lie along; None: each is a row of its own

    @property
    def edges(self) -> list[Edge]:
        return [self.node.next_functions[index] for index, _ in self.inputs]

    @property
    def rows(self) -> int:
        """How many blocks there are."""
        return self.shape.numel() // (1 if self.dim is None else max(self.shape[self.dim], 1))

    @property
    def layout(self) -> Layout:
        """Examples lie along the first dimension that is not a row's own."""
        if self.dim != 0 or not self.shape.numel():
            return along_first(self.shape)
        return Examples(self.shape[1], self.shape[2:].numel()) if len(self.shape) > 1 else Examples(1, self.rows)

    def to_rows(self, tensor: Tensor) -> Tensor:
        """[rows, entries]."""
        if self.dim is None:
            return tensor.reshape(-1, 1)
        return tensor.movedim(self.dim, -1).reshape(self.rows, self.shape[self.dim])

    def from_rows(self, rows: Tensor) -> Tensor:
        """The way back."""
        if self.dim is None:
            return rows.reshape(self.shape)
        moved = [*self.shape[: self.dim], *self.shape[self.dim + 1 :], self.shape[self.dim]]
        return rows.reshape(moved).movedim(-1, self.dim)

    def seeds(self, rows: Tensor) -> list[Tensor]:
        """One vector for each of the predictions."""
        vector = self.from_rows(rows)
        return [vector if sign > 0 else -vector for _, sign in self.inputs]

    def at(self, g: Tensor) -> Curvature:
        """The curvature when g arrives at the node."""
        return self.curvature(View(self.node), widened(g.detach()), self)

    def draws(self, g: Tensor, count: int, generator: torch.Generator | None) -> list[Tensor]:
        drawn = [self.seeds(rows) for rows in self.at(g).draw(count, generator)]
        return [torch.stack(vectors) for vectors in zip(*drawn, strict=True)]


@dataclass(frozen=True)
class NormalOfTwo(Likelihood):
    """Mean and variance v both predicted: a (log v + d²/v), as ``gaussian_nll_loss`` writes it; d is the difference.

    E[vvᵀ] is the Fisher information, 2a/v for the mean and a/v² for the variance.
    """

    node: Any  # the division
    log: Any

    @property
    def nodes(self) -> list[Any]:
        return [self.node, self.log]

    @property
    def edges(self) -> list[Edge]:
        (square, _), variance = self.node.next_functions
        return [square.next_functions[0], variance]

    @property
    def layout(self) -> Layout:
        return along_first(self.node._saved_other.shape)

    def draws(self, g: Tensor, count: int, generator: torch.Generator | None) -> list[Tensor]:
        variance = widened(self.node._saved_other)
        noise = _normal_noise(variance)(count, generator)
        root = _root(2 * widened(g))
        return [-root * noise / variance.sqrt(), root * (1 - noise.square()) / (2 * variance)]


def _categorical(node: Any, g: Tensor, likelihood: Blocks) -> Curvature:
    """Log-softmax: a = −Σ g over the classes."""
    return Categorical(likelihood.to_rows(node._saved_result).exp(), -likelihood.to_rows(g).sum(-1))


def _normal_noise(like: Tensor) -> Callable[[int, torch.Generator | None], Tensor]:
    def noise(count: int, generator: torch.Generator | None) -> Tensor:
        device = like.device if generator is None else generator.device
        drawn = torch.randn(count, *like.shape, generator=generator, device=device, dtype=like.dtype)
        return drawn.to(like.device)

    return noise


def _by_rule(node: Any, g: Tensor, likelihood: Blocks) -> Curvature:
    """An element-wise loss: what its rule says without anything behind it, f''g; drawn from with a normal."""
    shape = likelihood.shape
    found = RULES[node.name()](node, (None,), (g,), (shape,) + (None,) * (len(node.next_functions) - 1))[0]
    assert found is not None
    h = likelihood.to_rows(found.expand(shape))
    return Diagonal(h, _normal_noise(h))


def _bernoulli(node: Any, g: Tensor, likelihood: Blocks) -> Curvature:
    """Binary cross-entropy with logits y, drawn from as a coin: v = √a (σ(y) − b), b ~ σ(y)."""
    found = _by_rule(node, g, likelihood)
    assert isinstance(found, Diagonal)
    y = likelihood.to_rows(node._saved_self)
    q, spread = torch.sigmoid(y), sigmoid_slope(y)

    def noise(count: int, generator: torch.Generator | None) -> Tensor:
        coins = torch.bernoulli(_near(q, generator).expand(count, *q.shape), generator=generator).to(q.device)
        return (q - coins) / spread.clamp_min(torch.finfo(y.dtype).tiny).sqrt()

    return Diagonal(found.h, noise)


_ROWS: dict[str, Callable[[Any, Tensor, Blocks], Curvature]] = {
    "LogSoftmaxBackward0": _categorical,
    "MseLossBackward0": _by_rule,
    "HuberLossBackward0": _by_rule,
    "SmoothL1LossBackward0": _by_rule,
    "BinaryCrossEntropyWithLogitsBackward0": _bernoulli,
    "PowBackward0": _by_rule,
}
"""By the name of a node. Losses with a row are likelihoods up to a constant, the squared error that of a normal."""

_OF_DIFFERENCES = ("MseLossBackward0", "HuberLossBackward0", "SmoothL1LossBackward0")


def blocks_at(node: Any, wanted: Sequence[torch.Size | None]) -> Blocks | None:
    """What the node stands for in the table; None if nothing."""
    name = node.name()
    if name not in _ROWS or (name == "PowBackward0" and node._saved_exponent != 2):
        return None
    inputs = [index for index, shape in enumerate(wanted) if shape is not None]
    shapes = {wanted[index] for index in inputs}
    shape = shapes.pop()
    if shape is None or shapes or (inputs != [0] and name not in _OF_DIFFERENCES):
        return None
    if name == "PowBackward0" and hasattr(node.next_functions[0][0], "variable"):
        return None  # a penalty on a parameter, whose diagonal is exact
    if name in _OF_DIFFERENCES and node._saved_self.shape != node._saved_target.shape:
        return None  # broadcast
    dim = len(shape) - 1 if len(shape) > 1 else None
    if name == "LogSoftmaxBackward0":
        dim = signed(node._saved_dim) % len(shape) if shape else None
    return Blocks(node, tuple((index, 1 - 2 * index) for index in inputs), _ROWS[name], shape, dim)


def _is_square_over_variance(node: Any, wanted: Sequence[torch.Size | None]) -> bool:
    if node.name() != "DivBackward0" or len(set(wanted)) > 1:
        return False
    square = node.next_functions[0][0]
    return bool(square.name() == "PowBackward0" and square._saved_exponent == 2)


class Terms(NamedTuple):
    """What a loss is a sum of."""

    likelihoods: list[Likelihood]  # in which it is linear, but for operations on scalars
    penalties: list[Any]  # nodes that are functions of parameters themselves, in which it is linear, too
    stranger: str | None  # the first operation that is neither linear nor one of them
    reached: set[int]  # places that the loss is linear in, but for operations on scalars
    passed: set[int]  # those of them that are linear themselves, or operations on scalars


def likelihoods_of(graph: Graph, wiring: Wiring) -> Terms:
    """The likelihoods a loss is linear in, and those it is a function of as scalars: rooted, or weighed by others."""
    part = _linear_part(graph, wiring, 0)
    logs = {node.next_functions[0]: node for node in part.others if node.name() == "LogBackward0"}
    pairs = [(node, logs.get(node.next_functions[1])) for node in part.ratios]
    normals = [NormalOfTwo(node, log) for node, log in pairs if log is not None]
    known = {node for own in normals for node in own.nodes}
    strangers = [f"{node.name()} of a scalar" for node in part.scalars if _bends(node, graph, wiring, part.passed)]
    penalties = _penalties(part, graph) if part.found or normals else []  # beside one of those
    known.update(penalties)
    strangers += [node.name() for node in part.others if not (node in known or graph.places[node] in part.passed)]
    return Terms([*part.found, *normals], penalties, strangers[0] if strangers else None, part.reached, part.passed)


def _penalties(part: _Part, graph: Graph) -> list[Any]:
    return [node for node in part.others if graph.places[node] not in part.passed and _is_penalty(node)]


def _is_penalty(node: Any) -> bool:
    """Whether its rule knows its whole diagonal: nothing lies behind it but parameters, each read once."""
    rule, children = rule_of(node), [child for child, _ in node.next_functions if child is not None]
    are_leaves = all(hasattr(child, "variable") for child in children)
    is_plain = len(node._input_metadata) == 1 and len({*children}) == len(children)
    return rule is not None and rule.exact and are_leaves and is_plain


class _Part(NamedTuple):
    """What linear operations and those on scalars lead to."""

    found: list[Likelihood]
    others: list[Any]  # nodes that are neither linear nor likelihoods
    ratios: list[Any]  # those of them that divide a square by what may be its variance
    scalars: list[Any]  # those of all that work on scalars only, and have a rule
    reached: set[int]
    passed: set[int]


def _linear_part(graph: Graph, wiring: Wiring, start: int) -> _Part:
    part = _Part([], [], [], [], {start}, set())
    for place in wiring.order:
        node, wanted = graph.nodes[place], wiring.wanted[place]
        if place not in part.reached or not any(shape is not None for shape in wanted):
            continue
        own, rule, is_ratio = blocks_at(node, wanted), rule_of(node), _is_square_over_variance(node, wanted)
        is_linear = own is None and rule is not None and rule.is_linear(wanted)
        is_scalar = rule is not None and not any(wanted)
        if own is not None:
            part.found.append(own)
        elif not is_linear:
            part.others.append(node)
        if is_ratio:
            part.ratios.append(node)
        if is_scalar and not is_linear:
            part.scalars.append(node)
        if is_linear or (is_scalar and own is None and not is_ratio):
            part.passed.add(place)
            part.reached.update(link[0] for link in wiring.edges[place] if link is not None)
    return part


def _bends(node: Any, graph: Graph, wiring: Wiring, passed: Set[int]) -> bool:
    """Whether an operation on scalars is not linear in the likelihoods behind it: a factor without one is a weight.

    Nor in penalties, unless it is a likelihood itself: |p|² is one.
    """
    place, rule = graph.places[node], rule_of(node)
    parts = [None if link is None else _linear_part(graph, wiring, link[0]) for link in wiring.edges[place]]
    leads = [
        part is not None and bool(part.found or part.ratios or (place in passed and _penalties(part, graph)))
        for part in parts
    ]
    own = [shape if is_own else None for shape, is_own in zip(wiring.wanted[place], leads, strict=True)]
    return rule is not None and any(leads) and not rule.is_linear(own) and not _is_straight(rule)


def _is_straight(rule: Rule) -> bool:
    """Piecewise linear: |L − b| + b is a likelihood L again, or −L."""
    return isinstance(rule, Selection) or (isinstance(rule, Elementwise) and not (rule.derivatives or rule.ratio))


def known_likelihoods() -> str:
    """Their names, for messages."""
    return ", ".join(_ROWS)
