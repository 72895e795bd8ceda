"""Every operation of torch's own database whose graph is a single node: exact, or refused by name."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hesscale
from hesscale.rules import RULES
from hesscale.testing import check_rule

with warnings.catch_warnings(action="ignore"):
    from torch.testing._internal.common_methods_invocations import op_db

LARGEST, SAMPLES = 60, 1

REFUSED = {
    "_softmax_backward_data": "a backward formula, met only when gradients are differentiated",
    "_unsafe_masked_index_put_accumulate": "made by decompositions, not by models",
    "nextafter": "has no derivative in torch",
    "nn.functional.linear_cross_entropy.chunked": "an operator whose backward torch generates in Python",
    "nn.functional.linear_cross_entropy.chunked_none": "the same",
    "sparse.mm.reduce": "sparse",
    "sparse.sampled_addmm": "sparse",
    "to_sparse": "sparse",
}
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


def single_node_samples(op: Any) -> Iterator[tuple[Any, list[Tensor], str]]:
    """Functions of one node, the leaves they read, and the node's name."""
    for count, sample in enumerate(op.sample_inputs("cpu", torch.float64, requires_grad=True)):
        if count > 40:
            return
        arguments, options = [sample.input, *sample.args], sample.kwargs
        given = [*tensors_in(arguments), *tensors_in(list(options.values()))]
        leaves = [t for t in given if t.requires_grad]
        if not leaves or sum(t.numel() for t in leaves) > LARGEST or any(t.is_complex() for t in given):
            continue

        def function(*_: Tensor, arguments: Any = arguments, options: Any = options) -> Any:
            torch.manual_seed(0)
            outputs = [t for t in tensors_in(op.op(*arguments, **options)) if t.requires_grad and t.numel()]
            return outputs[0] if len(outputs) == 1 else outputs

        outputs = list(tensors_in(function()))
        nodes = {t.grad_fn for t in outputs}
        if len(nodes) != 1 or any(t.is_complex() for t in outputs):
            continue
        (node,) = nodes
        if node is not None and all(child is None or hasattr(child, "variable") for child, _ in node.next_functions):
            yield function, leaves, node.name()


def test_refused_operations_are_few() -> None:
    assert len(REFUSED) <= 0.1 * len(OPS)


@pytest.mark.parametrize("name", sorted(OPS))
@pytest.mark.filterwarnings("ignore")
def test_operation(name: str) -> None:
    tried = 0
    with contextlib.suppress(ImportError):  # some operations want scipy for their samples
        for function, leaves, node in single_node_samples(OPS[name]):
            if tried == SAMPLES:
                break
            tried += 1
            if node not in RULES:
                assert name in REFUSED, f"{node} has no rule"
                with pytest.raises(hesscale.MissingRuleError, match=node):
                    hesscale.attach(next(tensors_in(function())))
            elif name not in WRONG_IN_TORCH and RULES[node].exact:
                with contextlib.suppress(OracleMissingError):
                    checked(function, leaves)


class OracleMissingError(Exception):
    """torch cannot differentiate this operation twice."""


def checked(function: Any, leaves: list[Tensor]) -> None:
    try:
        check_rule(function, *leaves, tolerance=1e-7)
    except (RuntimeError, NotImplementedError) as error:
        if "is not implemented" in str(error):
            raise OracleMissingError from error
        raise
