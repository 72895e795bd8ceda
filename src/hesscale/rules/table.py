"""The rule table: node -> rule. It changes only at import, through ``register`` and, for a while, ``registered``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .families import Rule

Key = str | type[torch.autograd.Function]


class RuleTable(Mapping[Key, Rule]):
    """Rules by node name (``tensor.grad_fn.name()``), or by the class of a ``torch.autograd.Function``.

    Rows added to ``base`` later are seen too.

    >>> from hesscale.rules import RULES
    >>> RULES["TanhBackward0"].exact
    True
    """

    def __init__(self, rows: Mapping[Any, Rule] | None = None, *, base: RuleTable | None = None) -> None:
        self._rows: dict[Key, Rule] = dict(rows or {})
        self._base = base
        self._changes = 0

    def register(self, rule: Rule, *nodes: Key, replace: bool = False) -> None:
        """Adds a rule for one or several nodes. A row that holds another rule is overwritten with ``replace`` only.

        >>> hesscale.register(hesscale.Selection(), "MyViewBackward")
        >>> hesscale.register(hesscale.Elementwise(), "MyViewBackward", replace=True)
        """
        if not isinstance(rule, Rule):
            raise TypeError(f"a rule must be one of the families (Selection, Elementwise, …), not {rule!r}")
        if not nodes:
            raise ValueError("name at least one node, e.g. register(rule, 'TanhBackward0')")
        taken = [] if replace else [node for node in nodes if self.get(node, rule) != rule]
        if taken:
            names = ", ".join(map(str, taken))
            raise ValueError(f"already registered: {names}; pass replace=True to put this rule in place of the other")
        self._rows.update(dict.fromkeys(nodes, rule))
        self._changes += 1

    def unregister(self, *nodes: Key) -> None:
        """Takes rows away."""
        for node in nodes:
            self._rows.pop(node, None)
        self._changes += 1

    @contextlib.contextmanager
    def registered(self, rule: Rule, *nodes: Key) -> Iterator[None]:
        """Within a ``with`` block the rule is that of the nodes, whatever theirs was; afterwards all is as before.

        >>> from hesscale.rules import RULES, registered
        >>> with registered(hesscale.Selection(), "NobodysBackward"):
        ...     "NobodysBackward" in RULES
        True
        """
        before = {node: self._rows[node] for node in nodes if node in self._rows}
        self.register(rule, *nodes, replace=True)
        try:
            yield
        finally:
            self.unregister(*nodes)
            self._rows.update(before)

    def overlay(self, rows: Mapping[Any, Rule]) -> RuleTable:
        """A table with ``rows`` in front of this one, which stays as it is."""
        return RuleTable(rows, base=self)

    def find(self, name: str, function: type | None = None) -> Rule | None:
        """The rule of a node: that of its function's class if it has one, else that of its name."""
        found = None if function is None else self.get(function)
        return self.get(name) if found is None else found

    @property
    def version(self) -> int:
        """A number that grows with every change, also one of the base: plans are kept by it."""
        return self._changes + (0 if self._base is None else self._base.version)

    def __getitem__(self, key: Key) -> Rule:
        if key in self._rows or self._base is None:
            return self._rows[key]
        return self._base[key]

    def __iter__(self) -> Iterator[Key]:
        return iter({**dict.fromkeys(self._base or ()), **dict.fromkeys(self._rows)})

    def __len__(self) -> int:
        return len({*(self._base or ()), *self._rows})

    # a table is equal to itself only: plans are kept for tables that may still grow
    __eq__ = object.__eq__
    __hash__ = object.__hash__


RULES = RuleTable()
register = RULES.register
registered = RULES.registered
