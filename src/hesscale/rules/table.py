"""The rule table: node -> rule. It grows only at import and through ``register``; overlays never touch it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .families import Rule

Key = str | type[torch.autograd.Function]


class RuleTable(Mapping[Key, Rule]):
    """Rules by node name (``tensor.grad_fn.name()``), or by the class of a ``torch.autograd.Function``.

    Rows added to ``base`` later are seen too.
    """

    def __init__(self, rows: Mapping[Any, Rule] | None = None, *, base: RuleTable | None = None) -> None:
        self._rows: dict[Key, Rule] = dict(rows or {})
        self._base: Mapping[Key, Rule] = {} if base is None else base
        self._below = base

    def register(self, rule: Rule, *nodes: Key) -> None:
        """Adds a rule for one or several nodes. An existing row is never overwritten: use ``overlay`` for that."""
        if not isinstance(rule, Rule):
            raise TypeError(f"a rule must be one of the families (Selection, Elementwise, …), not {rule!r}")
        if not nodes:
            raise ValueError("name at least one node, e.g. register(rule, 'TanhBackward0')")
        taken = [node for node in nodes if node in self]
        if taken or len(set(nodes)) < len(nodes):
            names = ", ".join(map(str, taken or nodes))
            raise ValueError(f"already registered: {names}; replace rules with an overlay")
        self._rows.update(dict.fromkeys(nodes, rule))

    def overlay(self, rows: Mapping[Any, Rule]) -> RuleTable:
        """A table with ``rows`` in front of this one, which stays as it is."""
        return RuleTable(rows, base=self)

    def find(self, name: str, function: type | None = None) -> Rule | None:
        """The rule of a node: that of its function's class if it has one, else that of its name."""
        found = None if function is None else self.get(function)
        return self.get(name) if found is None else found

    @property
    def version(self) -> int:
        """A number that grows with every row, also one that is added to the base."""
        return len(self._rows) + (0 if self._below is None else self._below.version)

    def __getitem__(self, key: Key) -> Rule:
        try:
            return self._rows[key]
        except KeyError:
            return self._base[key]

    def __iter__(self) -> Iterator[Key]:
        return iter({**self._base, **self._rows})

    def __len__(self) -> int:
        return len({*self._base, *self._rows})

    # a table is equal to itself only: plans are kept for tables that may still grow
    __eq__ = object.__eq__
    __hash__ = object.__hash__


RULES = RuleTable()
register = RULES.register
