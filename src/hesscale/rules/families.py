"""The four shapes a curvature rule can have. For y = f(x), g = ∂L/∂y and s ≈ ∂²L/∂y² (its diagonal), every rule returns

    curvature at x_i  =  Σ_k (∂y_k/∂x_i)² s_k  (transport)  +  Σ_k g_k ∂²y_k/∂x_i²  (residual)

for each input. A missing s is zero curvature; a missing g means that the residual is not wanted.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..fast.chunking import Flattened, chunk_size, chunks, is_large, scratch_like
from ..fast.workspace import scratch, squared
from .calculus import added, pull, reduced

Curvatures = Sequence[Tensor | None]
Factor = Tensor | float | None


class Rule(ABC):
    """What one operation does to curvature."""

    pointwise: bool = False
    """Each output element depends on one element of each input, at the same place (up to broadcasting)."""

    exact: bool = True
    """Nothing is dropped inside the operation: its curvature is exact where the Hessian at its output is diagonal."""

    @abstractmethod
    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        """One curvature per input of ``node``; ``s`` and ``g`` have one entry per output, ``wanted`` the shapes of
        the inputs whose curvature is asked for (None elsewhere)."""

    @abstractmethod
    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        """Whether the node is jointly linear in the wanted inputs: it then has no residual, so it has no say in where
        the loss ends and the network begins (see HesScaleGN in backward.py)."""


@dataclass(frozen=True)
class Selection(Rule):
    """Linear with coefficients 0 and 1, so that J∘J = J and the node's own backward transports curvature: Jᵀs.

    ``scaled``: each input element feeds at most one output, with any coefficient c; then Jᵀs ∘ Jᵀ1 = c²s.
    ``linear=False``: which elements are selected depends on their values (max, sort), so f is only piecewise linear.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hesscale.backward(w.flip(0).square().sum())  # flip is one
    >>> w.curvature
    tensor([2., 2.])
    """

    scaled: bool = False
    linear: bool = True
    pointwise: bool = False

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        if s[0] is None and all(entry is None for entry in s):
            return (None,) * len(wanted)
        moved = self._scaled(node, s) if self.scaled else pull(node, *s)
        return [
            entry if entry is None or entry.shape == shape else reduced(entry, shape)
            for entry, shape in zip(moved, wanted, strict=True)
        ]

    def _scaled(self, node: Any, s: Curvatures) -> Curvatures:
        total: list[Tensor | None] = [None] * len(node.next_functions)
        for i, entry in enumerate(s):  # one output at a time: an input may feed several, each once
            if entry is None:
                continue
            alone = [entry if i == j else None for j in range(len(s))]
            ones = [None if t is None else torch.ones_like(t) for t in alone]
            pairs = zip(pull(node, *alone), pull(node, *ones), strict=True)
            total = [
                added(t, None if m is None or c is None else m * c) for t, (m, c) in zip(total, pairs, strict=True)
            ]
        return total

    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        return self.linear


def _in_one_group(wanted: Sequence[torch.Size | None], groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether all wanted inputs are among those of one group."""
    inputs = {i for i, shape in enumerate(wanted) if shape is not None}
    return any(inputs <= set(group) for group in groups)


Pair = tuple[Factor, Factor]
Ratio = tuple[float, float, Tensor | None]


@dataclass(frozen=True)
class Elementwise(Rule):
    """y_i = f(x_i, …):  f'² s + f'' g  for each input, summed over the places an input was broadcast to.

    ``derivatives(node)`` gives (f', f''), or one such pair per input. f'' None or 0 is zero. For one input f' may be
    None: the node's own backward, applied twice, is f'² s. Without ``derivatives`` f is piecewise linear.
    ``ratio(node)`` in their place is for an f with f''/f' = a + b·t, given as (a, b, t): then f'(f's + (f''/f')g) is
    torch's own backward, one more term, and that backward again: three sweeps over memory instead of seven. ``again``
    is that backward as a function of (gradient, t, grad_input=), which then needs no memory of its own.
    ``by_parts``: ``derivatives`` of one input, for some of its elements at a time: all that they read of the node are
    numbers and tensors of the input's shape. Large inputs are then worked on in chunks.
    ``linear`` lists groups of inputs in which f is jointly linear: add ((0, 1),), mul ((0,), (1,)), div ((0,),).

    >>> def sine(node):  # f' None: by the node's own backward
    ...     return None, -node._saved_self.sin()
    >>> with hesscale.rules.registered(hesscale.Elementwise(sine), "SinBackward0"):
    ...     hesscale.testing.check_rule(torch.sin, torch.randn(3, dtype=torch.float64, requires_grad=True))
    """

    derivatives: Callable[[Any], Pair | Sequence[Pair]] | None = None
    linear: tuple[tuple[int, ...], ...] = ()
    ratio: Callable[[Any], Ratio] | None = None
    again: Callable[..., Tensor] | None = None
    by_parts: bool = False
    pointwise: bool = True

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        output = _only_output(node, s, g)
        s0, g0 = s[output], g[output]
        if s0 is None and g0 is None:
            return (None,) * len(wanted)
        pairs: Any = None if self.ratio is not None or self.by_parts else self._pairs(node)
        if pairs is not None and isinstance(pairs[0], tuple):
            _refuse_odd(node, len(pairs), wanted)
            return [
                None if shape is None else reduced(_curvature(pair, s0, g0), shape)
                for pair, shape in zip(pairs, wanted, strict=True)
            ]
        variable = _only_input(node, wanted)
        back = functools.partial(_pulled, node, output, variable)
        if self.ratio is not None:
            found = _by_ratio(back, self.ratio(node), self.again, s0, g0)
        elif self.by_parts and self.derivatives is not None and _are_even((s0, g0), wanted[variable]):
            found = _by_parts(node, back, self.derivatives, s0, g0)
        else:
            found = _whole(back, self._pairs(node) if pairs is None else pairs, s0, g0)
        return _placed(found, variable, wanted)

    def _pairs(self, node: Any) -> Any:
        return (None, None) if self.derivatives is None else self.derivatives(node)

    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        return _in_one_group(wanted, self.linear)


def of_ratio(a: float, b: float, again: Callable[..., Tensor] | None = None) -> Elementwise:
    """The rule of an f with f''/f' = a + b·f."""
    return Elementwise(ratio=lambda node: (a, b, node._saved_result if b else None), again=again)


def unary(derivatives: Callable[[Any], Pair]) -> Elementwise:
    """The rule of an f of one variable, whose derivatives at some elements need no others."""
    return Elementwise(derivatives, by_parts=True)


def of_input(second: Callable[[Tensor], Tensor]) -> Elementwise:
    """The rule of an f whose f'' is a formula in x."""
    return unary(lambda node: (None, second(node._saved_self)))


def of_result(second: Callable[[Tensor], Tensor]) -> Elementwise:
    """The rule of an f whose f'' is a formula in y = f(x)."""
    return unary(lambda node: (None, second(node._saved_result)))


Back = Callable[[Tensor], Tensor | None]
"""From a gradient at the one output to that of the one input."""


def _only_output(node: Any, s: Curvatures, g: Curvatures) -> int:
    """The number of the output that a rule of one output is about; others, such as indices, carry nothing."""
    if len(s) == 1:
        return 0
    live = [nr for nr, pair in enumerate(zip(s, g, strict=True)) if any(entry is not None for entry in pair)]
    if len(live) > 1:
        raise NotImplementedError(
            f"the loss depends on {len(live)} outputs of {node.name()}, and its rule is one for a single output: "
            "register a Coupled rule with outputs=, or a Selection"
        )
    return live[0] if live else 0


def _only_input(node: Any, wanted: Sequence[torch.Size | None]) -> int:
    """The number of the input that a rule of one variable is about: the only one that is differentiated."""
    if len(wanted) == 1:
        return 0
    variables = [index for index, (child, _) in enumerate(node.next_functions) if child is not None]
    _refuse_odd(node, 1, wanted[: len(variables)])
    return variables[0]


def _refuse_odd(node: Any, given: int, inputs: Sequence[Any]) -> None:
    if given != len(inputs):
        raise ValueError(
            f"the rule of {node.name()} gives {given} entries for {len(inputs)} inputs: give one for each tensor among "
            "its arguments, and none for numbers and other things"
        )


def _placed(found: Tensor | None, variable: int, wanted: Sequence[torch.Size | None]) -> Curvatures:
    return (found,) if len(wanted) == 1 else [found if index == variable else None for index in range(len(wanted))]


def _pulled(node: Any, output: int, variable: int, v: Tensor) -> Tensor | None:
    return pull(node, *(None,) * output, v)[variable]


def _whole(back: Back, pair: Pair, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    first, second = pair
    if first is not None or s is None:
        return _curvature(pair, s, g)
    transport = _pulled_twice(back, s)
    if isinstance(second, Tensor) and transport is not None and g is not None:
        return torch.addcmul(transport, g, second)
    return added(transport, _curvature((None, second), None, g))


def _pulled_twice(back: Back, s: Tensor) -> Tensor | None:
    """f'² s"""
    once = back(s)
    return None if once is None else back(once)


def _are_even(tensors: Curvatures, shape: torch.Size | None) -> bool:
    """Whether those that are there are large, of this shape, and lie in memory as they are counted."""
    there = [tensor for tensor in tensors if tensor is not None]
    return is_large(there[0]) and all(type(x) is Tensor and x.shape == shape and x.is_contiguous() for x in there)


def _by_parts(
    node: Any, back: Back, derivatives: Callable[[Any], Any], s: Tensor | None, g: Tensor | None
) -> Tensor | None:
    """As ``_whole``, some elements at a time."""
    like = s if g is None else g
    assert like is not None
    result, transport = scratch_like(like), None
    seen = Flattened(node, like.numel())
    for part in chunks(like.numel(), chunk_size(like)):
        seen.part = part
        first, second = derivatives(seen)
        if first is None and s is not None and transport is None:
            transport = _pulled_twice(back, s)
        s_part, g_part, memory = _cut(s, part), _cut(g, part), result.view(-1)[part]
        if isinstance(first, Tensor) and isinstance(second, Tensor) and s_part is not None and g_part is not None:
            torch.mul(first, first, out=memory).mul_(s_part).addcmul_(g_part, second)
            continue
        total = added(_cut(transport, part), _curvature((first, second), s_part, g_part))
        if total is None:
            return None
        memory.copy_(total)
    return result


def _cut(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x.reshape(-1)[part]


def _by_ratio(
    back: Back, ratio: Ratio, again: Callable[..., Tensor] | None, s: Tensor | None, g: Tensor | None
) -> Tensor | None:
    """f'(f's + (a + bt)g)"""
    a, b, t = ratio
    if s is None:
        return None if g is None else back(a * g if t is None else g * (a + b * t))
    memory = None if again is None else scratch(s)
    inner = back(s) if again is None or memory is None else again(s, t, grad_input=memory)
    if inner is None:
        return None
    if g is not None and a:
        inner = torch.add(inner, g, alpha=a, out=memory)
    if g is not None and t is not None:
        inner = torch.addcmul(inner, g, t, value=b, out=memory)
    if again is not None and memory is not None:
        return again(inner, t, grad_input=memory)
    return back(inner)


def _curvature(pair: Pair, s: Tensor | None, g: Tensor | None) -> Tensor | None:
    first, second = pair
    transport = None if s is None or first is None else _times(s, first * first)
    residual = None if g is None or second is None else g * second
    return added(transport, residual)


def _times(s: Tensor, square: Tensor | float) -> Tensor:
    return s if isinstance(square, (int, float)) and square == 1 else s * square  # sums and differences: as it is


@dataclass(frozen=True)
class Bilinear(Rule):
    """y = A ∘ B for a product ∘: the ordinary backward with squared operands, and no residual.

    ``backward(node, s, wanted, *squares)`` returns one curvature per input; ``operands`` names the saved tensors whose
    squares it gets (None where torch did not save one because nothing needs it). ``linear`` as in Elementwise.

    >>> def product(node, s, wanted, a, b):  # y = AB, given A² and B²
    ...     return s @ b.T, a.T @ s
    >>> x, w = (torch.randn(2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    >>> with hesscale.rules.registered(hesscale.Bilinear(product, ("self", "mat2")), "MmBackward0"):
    ...     hesscale.testing.check_rule(torch.mm, x, w)
    """

    backward: Callable[..., Curvatures]
    operands: tuple[str, ...]
    linear: tuple[tuple[int, ...], ...] = ((0,), (1,))

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(f"_saved_{name}" for name in self.operands)

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        s0 = s[_only_output(node, s, g)]
        if s0 is None:
            return (None,) * len(wanted)
        squares = [None if (saved := getattr(node, name)) is None else squared(saved) for name in self._names]
        found = self.backward(node, s0, wanted, *squares)
        _refuse_odd(node, len(found), wanted)
        return found

    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        return _in_one_group(wanted, self.linear)


@dataclass(frozen=True)
class Coupled(Rule):
    """Outputs that depend on many inputs: transport and residual in closed form.

    ``curvature(node, s, g)`` returns the curvature of the one input, or a tuple with one per input. ``s`` and ``g`` are
    tensors (None if missing), or tuples of them with ``outputs`` > 1. ``exact=False``: terms are dropped inside.

    >>> def log_sum_exp(node, s, g):  # of a vector, with q = softmax(x): g(q − q²) + q²s
    ...     q = (node._saved_self - node._saved_result).exp()
    ...     return g * (q - q**2) + (0 if s is None else q**2 * s)
    >>> x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    >>> with hesscale.rules.registered(hesscale.Coupled(log_sum_exp), "LogsumexpBackward0"):
    ...     hesscale.testing.check_rule(lambda x: x.logsumexp(0), x)
    """

    curvature: Callable[[Any, Any, Any], Tensor | Curvatures | None]
    outputs: int = 1
    linear: bool = False
    pointwise: bool = False
    exact: bool = True

    def __call__(self, node: Any, s: Curvatures, g: Curvatures, wanted: Sequence[torch.Size | None]) -> Curvatures:
        if all(entry is None for entry in (*s, *g)):
            return (None,) * len(wanted)
        output = _only_output(node, s, g) if self.outputs == 1 else None
        result = self.curvature(node, s, g) if output is None else self.curvature(node, s[output], g[output])
        if result is None or isinstance(result, Tensor):
            result = _placed(result, _only_input(node, wanted), wanted)
        _refuse_odd(node, len(result), wanted)
        return [reduced(entry, shape) for entry, shape in zip(result, wanted, strict=True)]

    def is_linear(self, wanted: Sequence[torch.Size | None]) -> bool:
        return self.linear


NETWORK: Final = (-1,)
"""Borders of a graph all of which is network: its outputs."""


class Inner(NamedTuple):
    """How a pass goes through a node that stands for a graph of its own."""

    method: str
    borders: tuple[int, ...] = ()  # outputs of the node where the network ends and the loss begins, if they are known
    missing: str = "raise"
    rank: int | str = 0


class Composite(Rule):
    """The rule of a node that stands for a graph of its own. A plan looks into that graph, and says how to walk it."""

    @property
    @abstractmethod
    def rows(self) -> Sequence[Any]:
        """Of the graph inside, its root first."""

    @abstractmethod
    def wiring(self, wanted: Sequence[torch.Size | None]) -> Any:
        """The graph inside, as far as it leads to the wanted inputs."""

    @abstractmethod
    def within(self, inner: Inner) -> Rule:
        """The rule for such a pass. It is called with gradients in any case."""


def signed(dim: int) -> int:
    """A saved dimension as written by the user: nodes hand negative ones over as unsigned 64-bit numbers."""
    return dim - 2**64 if dim >= 2**63 else dim
