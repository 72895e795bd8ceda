"""What a pass over a graph would do, told before anyone trains: which operations have an exact rule, or any."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from .columns.dial import Columns, Rank, checked_rank, make_dial
from .graph import LEAF, function_of, graph_of, hiding
from .plan import behind_nonlinear, method_named
from .regions import find_regions
from .wiring import wire


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
    rows = graph.rows
    wiring = wire(rows)
    kinds: dict[str, Counter[str]] = {"exact": Counter(), "approximated": Counter(), "missing": Counter()}
    hidden = hiding(rows)
    rules = [None if name in hidden else table.find(name, function_of(kind)) for name, kind, _, _ in rows]
    for name, rule in zip(wiring.names, rules, strict=True):
        if name != LEAF:
            kinds["missing" if rule is None else "exact" if rule.exact else "approximated"][name] += 1
    regions = find_regions(wiring, rules, frozenset())
    inside = {place for region in regions.values() for link in region.sources for place in (link[0], *region.places)}
    several = (place for place in wiring.order if wiring.consumers[place] > 1 and len(wiring.shapes[place]) == 1)
    shared = sum(place not in inside for place in several)
    exact, approximated, missing = (dict(sorted(kinds[kind].items())) for kind in kinds)
    loss_places = set(wiring.order) - behind_nonlinear(wiring, rules) if way.gauss_newton else set()
    ops = Counter(wiring.names[place] for place in wiring.order if place in loss_places and wiring.names[place] != LEAF)
    counting = frozenset(loss_places if way.gauss_newton else wiring.order) - inside
    columns = checked_rank(rank)
    dial = make_dial(graph, columns, counting, None, None) if columns else None
    return Report(
        exact,
        approximated,
        missing,
        shared=shared,
        regions=len(regions),
        loss=dict(ops),
        columns=None if dial is None else dial.report(graph),
    )
