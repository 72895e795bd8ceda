"""What a pass over a graph would do, told before anyone trains: which operations have an exact rule, or any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .columns.dial import Columns, Rank, checked_rank, make_dial
from .graph import LEAF, Row, function_of, graph_of, hiding
from .plan import behind_nonlinear, method_named
from .regions import find_regions
from .rules.families import Composite, Rule
from .rules.table import RuleTable
from .wiring import Wiring, wire

_COMPILED = (
    "check cannot tell what rank= carries through a compiled region: compute the loss within "
    "`with torch.compiler.set_stance('force_eager'):`"
)
_SEEDS = "SeedsBackward"  # the root of the graph of a compiled region: none of its operations


@dataclass(frozen=True)
class Report:
    """Operations of a graph by node name, with their number.

    It is about rules: with exact ones for all of them a result can still be far off.

    >>> x = torch.ones(3, requires_grad=True)
    >>> hesscale.check((x * x.sigmoid()).sum()).regions
    1
    """

    exact: dict[str, int]  # nothing is dropped inside these; what is, is dropped between them
    approximated: dict[str, int]  # fused kernels of several steps, between which cross terms are dropped
    missing: dict[str, int]  # no rule: a pass would raise MissingRuleError
    shared: int  # tensors whose paths meet again later, beyond element-wise expressions: cross terms are dropped there
    regions: int  # element-wise expressions that part and meet again, treated exactly
    loss: dict[str, int] = field(default_factory=dict)  # hesscale_gn: the operations whose residual counts
    columns: Columns | None = None  # rank=: what is carried beside the diagonal, and where random signs are needed

    def __str__(self) -> str:
        lines = []
        kinds = ("exact rule", self.exact), ("approximate rule", self.approximated), ("no rule", self.missing)
        for title, names in kinds:
            lines.append(f"{title}: {sum(names.values())} nodes of {len(names)} kinds")
            lines += [f"  {name} x{count}" for name, count in names.items()]
        lines.append(f"element-wise expressions that meet again, treated as one function: {self.regions}")
        lines.append(f"tensors read on several paths, summed without cross terms: {self.shared}")
        if self.loss:
            lines.append(f"the loss, as Gauss-Newton sees it without output=: {', '.join(self.loss)}")
        if self.columns is not None:
            lines.append(str(self.columns))
        return "\n".join(lines)


def check(loss: Tensor, *, method: str = "hesscale", rank: Rank = 0) -> Report:
    """What ``hesscale.backward`` would meet with this method and rank. Prints as a short table; nothing is run.

    It is about rules; how near a result is to the truth, ``hesscale.testing.compare_with_exact`` measures.

    >>> x = torch.ones(3, requires_grad=True)
    >>> print(hesscale.check(x.tanh().sum()))
    exact rule: 2 nodes of 2 kinds
      SumBackward0 x1
      TanhBackward0 x1
    approximate rule: 0 nodes of 0 kinds
    no rule: 0 nodes of 0 kinds
    element-wise expressions that meet again, treated as one function: 0
    tensors read on several paths, summed without cross terms: 0
    """
    way = method_named(method)
    table = way.rules
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise RuntimeError("there is no graph to look at: the loss does not require grad")
    graph = graph_of(loss)
    parts = [*_parts(graph.rows, wire(graph.rows), table, is_loss=True)]
    if len(parts) > 1 and checked_rank(rank):
        raise ValueError(_COMPILED)
    kinds: dict[str, Counter[str]] = {"exact": Counter(), "approximated": Counter(), "missing": Counter()}
    ops: Counter[str] = Counter()
    shared = count = 0
    counting: frozenset[int] = frozenset()
    for part in parts:
        for name, rule in part.named():
            kinds["missing" if rule is None else "exact" if rule.exact else "approximated"][name] += 1
        regions = find_regions(part.wiring, part.rules, frozenset())
        inside = {
            place for region in regions.values() for link in region.sources for place in (link[0], *region.places)
        }
        shared += sum(place not in inside for place in part.several())
        count += len(regions)
        loss_places = part.loss() if way.gauss_newton else set()
        ops.update(name for name, _ in part.named(loss_places))
        counting = frozenset(loss_places if way.gauss_newton else part.wiring.order) - inside
    exact, approximated, missing = (dict(sorted(kinds[kind].items())) for kind in kinds)
    columns = checked_rank(rank)
    dial = make_dial(graph, columns, counting, None, None) if columns else None
    return Report(
        exact,
        approximated,
        missing,
        shared=shared,
        regions=count,
        loss=dict(ops),
        columns=None if dial is None else dial.report(graph),
    )


@dataclass(frozen=True)
class _Part:
    """The graph of a loss, or one that a node of it stands for."""

    wiring: Wiring
    rules: Sequence[Rule | None]
    is_loss: bool  # it begins with the loss

    def named(self, places: Collection[int] | None = None) -> Iterator[tuple[str, Rule | None]]:
        """The operations, by name, and their rules; without what only stands for others."""
        for place in self.wiring.order:
            name, rule = self.wiring.names[place], self.rules[place]
            is_named = name not in (LEAF, _SEEDS) and not isinstance(rule, Composite)
            if is_named and (places is None or place in places):
                yield name, rule

    def several(self) -> Iterator[int]:
        """The places of tensors that are read on several paths."""
        order, consumers, shapes = self.wiring.order, self.wiring.consumers, self.wiring.shapes
        return (place for place in order if consumers[place] > 1 and len(shapes[place]) == 1)

    def loss(self) -> set[int]:
        """Where Gauss-Newton sees the loss."""
        return set(self.wiring.order) - behind_nonlinear(self.wiring, self.rules) if self.is_loss else set()


def _parts(rows: Sequence[Row], wiring: Wiring, table: RuleTable, *, is_loss: bool) -> Iterator[_Part]:
    hidden = hiding(rows)
    rules = [None if name in hidden else table.find(name, function_of(kind)) for name, kind, _, _ in rows]
    part = _Part(wiring, rules, is_loss)
    yield part
    for place in wiring.order:
        rule = rules[place]
        if isinstance(rule, Composite):
            inner = rule.wiring(wiring.wanted[place])
            yield from _parts(rule.rows, inner, table, is_loss=is_loss and place in part.loss())
