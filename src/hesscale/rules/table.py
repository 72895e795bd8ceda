"""The rule table: node name -> rule. It grows only at import and through ``register``; overlays never touch it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .families import Rule


class RuleTable(Mapping[str, Rule]):
    """Rules by node name (``tensor.grad_fn.name()``). Rows added to ``base`` later are seen too."""

    def __init__(self, rows: Mapping[str, Rule] | None = None, *, base: RuleTable | None = None) -> None:
        self._rows: dict[str, Rule] = dict(rows or {})
        self._base: Mapping[str, Rule] = {} if base is None else base

    def register(self, rule: Rule, *node_names: str) -> None:
        """Adds a rule under one or several names. An existing row is never overwritten: use ``overlay`` for that."""
        if not isinstance(rule, Rule):
            raise TypeError(f"a rule must be one of the families (Selection, Elementwise, …), not {rule!r}")
        if not node_names:
            raise ValueError("name at least one node, e.g. register(rule, 'TanhBackward0')")
        taken = [name for name in node_names if name in self]
        if taken or len(set(node_names)) < len(node_names):
            raise ValueError(f"already registered: {', '.join(taken or node_names)}; replace rules with an overlay")
        self._rows.update(dict.fromkeys(node_names, rule))

    def overlay(self, rows: Mapping[str, Rule]) -> RuleTable:
        """A table with ``rows`` in front of this one, which stays as it is."""
        return RuleTable(rows, base=self)

    def __getitem__(self, name: str) -> Rule:
        try:
            return self._rows[name]
        except KeyError:
            return self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._base, **self._rows})

    def __len__(self) -> int:
        return len({*self._base, *self._rows})


RULES = RuleTable()
register = RULES.register
