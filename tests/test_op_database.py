"""Every operation of torch's own database: a single node is exact or refused by name, several are the recursion."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hesscale
from hesscale.graph import edge_of
from hesscale.plan import Method, make_plan
from hesscale.rules import RULES
from hesscale.rules.fallback import ByAutograd
from hesscale.rules.table import RuleTable
from hesscale.testing import check_rule
from hesscale.walk import Walk

from .versions import has_rule

with warnings.catch_warnings(action="ignore"):
    from torch.testing._internal.common_methods_invocations import UnaryUfuncInfo, op_db

SIZES, LARGEST_OUTPUT = (60, 150), 150
"""How many numbers a sample may have; larger ones where there is no smaller."""

REFUSED = {
    **dict.fromkeys(("fft.hfft", "fft.hfft2", "fft.hfftn"), "complex transforms"),
    **dict.fromkeys(("fft.irfft", "fft.irfft2", "fft.irfftn"), "complex transforms"),
    "_unsafe_masked_index_put_accumulate": "made by decompositions, not by models",
    "nextafter": "has no derivative in torch",
    "nn.functional.linear_cross_entropy.chunked": "an operator whose backward torch generates in Python",
    "nn.functional.linear_cross_entropy.chunked_none": "the same",
    "sparse.mm.reduce": "sparse",
    "sparse.sampled_addmm": "sparse",
    "to_sparse": "sparse",
}
for grid_sampler in {"grid_sampler_2d", "grid_sampler_3d"}:
    if not has_rule(f"GridSampler{grid_sampler[-2:].upper()}Backward0"):
        REFUSED[grid_sampler] = "this torch differentiates it once only"
WRONG_IN_TORCH = {
    "__rpow__": "its samples have negative bases, where everything is nan",
    "linalg.norm.subgradients_at_zero": "torch's second derivative at zero is nan, ours is zero",
    "native_layer_norm": "torch's double backward forgets a bias that comes without a weight",
}


def name_of(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


OPS = {name_of(op): op for op in op_db if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")}


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)


def samples_of(op: Any, largest: int) -> Iterator[tuple[Any, list[Tensor], list[Tensor]]]:
    """Functions of real numbers, not too many, the leaves they read, and what they return."""
    for count, sample in enumerate(op.sample_inputs("cpu", torch.float64, requires_grad=True)):
        if count > 40:
            return
        first = sample.input
        if isinstance(op, UnaryUfuncInfo) and first.numel() > largest:
            first = first.detach().reshape(-1)[:: first.numel() // 20].requires_grad_()  # as good as all of it
        arguments, options = [first, *sample.args], sample.kwargs
        given = [*tensors_in(arguments), *tensors_in(list(options.values()))]
        leaves = [t for t in given if t.requires_grad]
        if not leaves or sum(t.numel() for t in leaves) > largest or any(t.is_complex() for t in given):
            continue

        def function(*_: Tensor, arguments: Any = arguments, options: Any = options) -> Any:
            torch.manual_seed(0)
            outputs = [t for t in tensors_in(op.op(*arguments, **options)) if t.requires_grad and t.numel()]
            return outputs[0] if len(outputs) == 1 else outputs

        outputs = list(tensors_in(function()))
        if outputs and not any(t.is_complex() for t in outputs) and sum(t.numel() for t in outputs) <= LARGEST_OUTPUT:
            yield function, leaves, outputs


def single_node_samples(op: Any, largest: int) -> Iterator[tuple[Any, list[Tensor], str]]:
    """Functions of one node, the leaves they read, and the node's name."""
    for function, leaves, outputs in samples_of(op, largest):
        nodes = {t.grad_fn for t in outputs}
        (node, *others) = nodes
        if others or node is None:
            continue
        if all(child is None or hasattr(child, "variable") for child, _ in node.next_functions):
            yield function, leaves, node.name()


def test_refused_operations_are_few() -> None:
    assert len(REFUSED) <= 0.1 * len(OPS)


@pytest.mark.parametrize("name", sorted(OPS))
@pytest.mark.filterwarnings("ignore")
def test_operation(name: str) -> None:
    if name in WRONG_IN_TORCH:
        pytest.skip(WRONG_IN_TORCH[name])
    try:
        single = next((found for size in SIZES for found in single_node_samples(OPS[name], size)), None)
        several = next(samples_of(OPS[name], SIZES[0]), None) if single is None else None
    except ImportError:
        pytest.skip("its samples want a package that is not here")
    if single is not None:
        check_node(name, *single)
    elif several is not None:
        check_composition(name, several[0], several[1])
    else:
        pytest.skip("it has no small sample of real numbers with a gradient")


def check_node(name: str, function: Any, leaves: list[Tensor], node: str) -> None:
    """One node is exact, or refused by name."""
    if node not in RULES:
        assert name in REFUSED, f"{node} has no rule"
        with pytest.raises(hesscale.MissingRuleError, match=node):
            hesscale.attach(next(tensors_in(function())))
    elif RULES[node].exact:
        try:
            check_rule(function, *leaves, tolerance=1e-7)
        except (RuntimeError, NotImplementedError) as error:
            if "is not implemented" not in str(error):
                raise
            pytest.skip("torch cannot differentiate it twice, and the table of rules has its own test of it")
    else:
        pytest.skip("a kernel of several steps, with tests of its own")


def check_composition(name: str, function: Any, leaves: list[Tensor]) -> None:
    """Several nodes are the recursion over what autograd says of each of them, without any rule."""
    y = torch.cat([t.reshape(-1) for t in tensors_in(function())])
    report = hesscale.check(y.sum())
    if report.missing:
        assert name in REFUSED, f"no rule for {', '.join(report.missing)}"
        with pytest.raises(hesscale.MissingRuleError):
            hesscale.attach(y.sum())
        return
    if report.regions:
        pytest.skip("expressions that meet again are more than the recursion over their nodes")
    generator = torch.Generator().manual_seed(0)
    g, s = (torch.randn(y.shape, generator=generator, dtype=y.dtype) for _ in range(2))
    try:
        plan, graph = make_plan(
            y, Method(RuleTable()), seeded=True, targets=[edge_of(x) for x in leaves], fallback=ByAutograd()
        )
        walk = Walk(plan, graph, s)
        torch.autograd.grad(y, leaves, g, retain_graph=True, allow_unused=True)
        walk.disarm()
    except NotImplementedError as error:
        pytest.skip(f"autograd alone cannot: {str(error)[:100]}")
    expected = walk.results(leaves, [True] * len(leaves))
    found = hesscale.diagonal(y, leaves, g, s)
    for x, ours, theirs in zip(leaves, found, expected, strict=True):
        torch.testing.assert_close(torch.zeros_like(x) if ours is None else ours, theirs, rtol=1e-7, atol=1e-7)
