"""What a pass over a graph would do, told before anyone trains: which operations are exact, approximated or missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from .graph import LEAF, edge_of, trace
from .plan import method_named
from .regions import find_regions


@dataclass(frozen=True)
class Report:
    """Operations of a graph by node name, with their number."""

    exact: dict[str, int]  # nothing is dropped inside these
    approximated: dict[str, int]  # fused kernels of several steps, between which cross terms are dropped
    missing: dict[str, int]  # no rule: a pass would raise MissingRuleError
    shared: int  # tensors whose paths meet again later, beyond element-wise expressions: cross terms are dropped there
    regions: int  # element-wise expressions that part and meet again, treated exactly

    def __str__(self) -> str:
        lines = []
        for title, names in (("exact", self.exact), ("approximated", self.approximated), ("missing", self.missing)):
            lines.append(f"{title}: {sum(names.values())} nodes of {len(names)} kinds")
            lines += [f"  {name} x{count}" for name, count in names.items()]
        lines.append(f"element-wise expressions that meet again, exact: {self.regions}")
        lines.append(f"tensors read on several paths, summed without cross terms: {self.shared}")
        return "\n".join(lines)


def check(loss: Tensor, *, method: str = "hesscale") -> Report:
    """What ``hesscale.backward(loss, method=method)`` would meet. Prints as a short table; nothing is run."""
    table = method_named(method).rules
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise RuntimeError("there is no graph to look at: the loss does not require grad")
    graph = trace(edge_of(loss))
    kinds: dict[str, Counter[str]] = {"exact": Counter(), "approximated": Counter(), "missing": Counter()}
    rules = {}
    for node in graph.order:
        name = node.name()
        rule = table.find(name, getattr(type(node), "_forward_cls", None))
        if name == LEAF:
            continue
        if rule is not None:
            rules[node] = rule
        kinds["missing" if rule is None else "exact" if rule.exact else "approximated"][name] += 1
    regions = find_regions(graph, rules, frozenset())
    inside = {node for region in regions.values() for edge in region.sources for node in (edge[0], *region.nodes)}
    several = (node for node in graph.order if graph.consumers[node] > 1 and len(graph.shapes[node]) == 1)
    shared = sum(node not in inside for node in several)
    exact, approximated, missing = (dict(sorted(kinds[kind].items())) for kind in kinds)
    return Report(exact, approximated, missing, shared=shared, regions=len(regions))
