"""``rank=``: the loss's own curvature carried as vectors, as many as asked for, and only the rest as a diagonal.

    diag H  ≈  Σ_examples Σ_{j ≤ rank} (J_nᵀ u_nj)²  +  the walk, seeded with the diagonal minus Σ_j u_j²

u_j are the leading eigenvectors of the loss's Hessian at the predictions of one row, times the roots of their
eigenvalues. Rank 0 is HesScale, all of them the exact Gauss-Newton diagonal and HesScale's residual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..graph import Graph, Link
from ..traced import value_of
from ..wiring import Wiring, wire
from .hutchinson import random_signs
from .likelihoods import FULL, Blocks, Curvature, blocks_at, known_likelihoods, likelihoods_of
from .targets import Target, find_targets, pulled_squares

Rank = int | Literal["full"]

_NO_COLUMNS = (
    "rank={rank!r} carries the curvature of a likelihood, and this loss is linear in none ({known}) that counts here: "
    "leave rank= out"
)
_SHARDED = (
    "rank= cannot pull columns through a model that fully_shard has sharded: its hooks would reduce them as if they "
    "were gradients; leave rank= out, or train with DDP"
)


def checked_rank(rank: Rank) -> int:
    """The number of columns, FULL for all; an error for anything that is no rank."""
    if rank == "full":
        return FULL
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f'rank must be a number of columns, 0 or more, or "full", not {rank!r}')
    return rank


@dataclass
class Dial:
    """What a pass has to know in order to carry columns; it holds no node. Squares gather in ``squares``."""

    rank: int
    wiring: Wiring
    places: frozenset[int]  # of the likelihoods
    targets: tuple[Link, ...]  # whose squares are wanted
    generator: torch.Generator | None
    squares: dict[Link, Tensor] = field(default_factory=dict)

    def carry(self, graph: Graph, place: int, g: Tensor) -> list[Tensor | None]:
        """Sends the columns of one likelihood, at whose output g arrives; returns what is left for each of its inputs.

        That is a diagonal of the sign of the loss's own, never more than it.
        """
        term = self._term(graph, place)
        targets = self._found(graph, term)
        curvature = term.at(g)
        rest, sign = curvature.diagonal()
        for vector, weight in self._vectors(term, curvature, targets, rest):
            self._pull(graph, term, vector, weight, targets)
        chosen = [index for index, _ in term.inputs] if self.rank != FULL else []  # all there is has been carried
        rest = term.from_rows(rest.clamp_min_(0).mul_(sign))
        return [rest if index in chosen else None for index in range(len(self.wiring.wanted[place]))]

    def _term(self, graph: Graph, place: int) -> Blocks:
        term = blocks_at(graph.nodes[place], self.wiring.wanted[place])
        assert term is not None
        return term

    def _found(self, graph: Graph, term: Blocks) -> list[Target | None]:
        layouts = dict.fromkeys(term.edges, term.layout)
        return find_targets(graph, self.wiring, layouts, [graph.edge(link) for link in self.targets])

    def _vectors(
        self, term: Blocks, curvature: Curvature, targets: Sequence[Target | None], rest: Tensor
    ) -> Iterator[tuple[Tensor, float]]:
        """What is to be pulled, [rows, entries], and the sign of its squares. Takes their share off ``rest``."""
        fewest = min((target.count for target in targets if target is not None), default=term.rows)
        for u, signs in curvature.columns(self.rank):
            rest.addcmul_(u, u, value=-1)
            if self.rank != FULL and fewest < term.rows:  # rows that meet must not add up
                u.mul_(random_signs((term.rows, 1), u, self.generator))
            for part in _rows_apart(u, term.rows // fewest) if self.rank == FULL else (u,):
                yield from _by_sign(part, signs)

    def _pull(
        self, graph: Graph, term: Blocks, vector: Tensor, weight: float, targets: Sequence[Target | None]
    ) -> None:
        shapes = [self.wiring.shapes[place][nr] for place, nr in self.targets]
        found = pulled_squares(graph, self.wiring, term.edges, term.seeds(vector), targets, shapes)
        for link, squares in zip(self.targets, found, strict=True):
            if squares is not None:
                before = self.squares.get(link)
                signed = squares if weight == 1 else squares.neg_()
                self.squares[link] = signed if before is None else before.add_(signed)

    def report(self, graph: Graph) -> Columns:
        """What is going to happen, for ``hesscale.check``."""
        names: Counter[str] = Counter()
        mixed: Counter[str] = Counter()
        joined = 0
        for place in sorted(self.places):
            term = self._term(graph, place)
            names[term.node.name()] += 1
            for target in self._found(graph, term):
                if target is not None and target.mixed is not None and term.rows > 1:
                    mixed[target.mixed.by] += 1
                elif target is not None and target.count < term.rows:
                    joined += 1
        return Columns(dict(names), dict(sorted(mixed.items())), joined)


@dataclass(frozen=True)
class Columns:
    """What ``rank=`` does in a graph."""

    likelihoods: dict[str, int]  # whose curvature is carried as columns
    mixed: dict[str, int]  # parameters that get one column of random signs for the whole batch, by what mixes it
    joined: int  # parameters whose examples have several rows each, such as tokens, joined by random signs

    def __str__(self) -> str:
        lines = [f"columns from: {', '.join(f'{name} x{count}' for name, count in self.likelihoods.items())}"]
        lines += [
            f"random signs over the whole batch, {count} tensors: examples meet in {name}, or it is not known"
            for name, count in self.mixed.items()
        ]
        if self.joined:
            lines.append(f"random signs over the rows (tokens, places) of each example: {self.joined} tensors")
        return "\n".join(lines)


def _rows_apart(u: Tensor, size: int) -> Iterator[Tensor]:
    """u in parts, each with one row of every group of ``size`` rows."""
    if size == 1:
        yield u
        return
    for place in range(size):
        part = torch.zeros_like(u)
        part[place::size] = u[place::size]
        yield part


def _by_sign(u: Tensor, signs: Tensor) -> Iterator[tuple[Tensor, float]]:
    """The rows that count positive, and apart from them those that count negative; both where nobody can look."""
    if value_of((signs < 0).any()) is False:
        yield u, 1.0
        return
    for weight in (1.0, -1.0):
        if value_of((signs == weight).any()) is not False:
            yield u.where((signs == weight).unsqueeze(-1), 0.0), weight


def make_dial(
    graph: Graph,
    rank: int,
    counting: frozenset[int],
    targets: Sequence[Link] | None,
    generator: torch.Generator | None,
) -> Dial:
    """The dial for a pass to ``targets`` (all leaves if None), where the residual at places in ``counting`` counts."""
    if any(row[0].startswith("RegisterPostBackwardFunction") for row in graph.rows):
        raise RuntimeError(_SHARDED)
    wiring = wire(graph.rows, targets)
    terms: Sequence[Any] = likelihoods_of(graph, wiring).likelihoods
    places = frozenset(graph.places[term.node] for term in terms if isinstance(term, Blocks)) & counting
    if not places:
        raise ValueError(_NO_COLUMNS.format(rank="full" if rank == FULL else rank, known=known_likelihoods()))
    leaves = [(place, 0) for place in wiring.order if not graph.rows[place][2]]
    return Dial(rank, wiring, places, tuple(leaves if targets is None else dict.fromkeys(targets)), generator)
