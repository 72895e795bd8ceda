"""``hesscale coverage``: which operations have a rule, against torch's own lists of what can appear in a graph."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torchgen
import typer
from torch import Tensor

from hesscale.rules import RULES

from ..startup import what_to_install
from .console import clear_errors, stop

# groups of nodes that no model's loss leads through, or that cannot have a real curvature; first match counts
_REASONS = {
    r"BackwardBackward\d": "appears only when gradients are differentiated",
    r"Nested|Values|Jagged": "nested tensors",
    r"Sparse|Coalesce|ToDense": "sparse tensors",
    r"Fft|Complex|Conj|Polar|ViewAsReal|LinalgEig": "complex numbers",
    r"Quantize|FusedMovingAvg": "quantization",
    r"^Test|UndefinedGrad|SendRpc": "internal to torch",
    r"Cudnn|Miopen|Mps|Mkldnn|Nnpack|SlowConv|ConvDepthwise|Overrideable|Thnn|LstmMps": "kernels of other builds",
    r"^(Eq|Ge|Gt|Le|Lt|Ne)Backward": "comparisons have no derivative",
}


@dataclass(frozen=True)
class Coverage:
    """The names of nodes with and without a rule, and the operations of torch's database."""

    exact: list[str]
    approximated: list[str]
    missing: dict[str, list[str]]  # by reason
    formulas: int  # entries of derivatives.yaml
    operations: dict[str, str]  # operation -> its node, where the graph is a single one


def measure() -> Coverage:
    """The coverage of the installed torch by the rule table."""
    known = sorted(name for name in RULES if isinstance(name, str))
    missing: dict[str, list[str]] = {}
    for name in sorted(dir(torch._C._functions)):
        if "Backward" in name and name not in RULES:
            missing.setdefault(_reason(name), []).append(name)
    return Coverage(
        exact=[name for name in known if RULES[name].exact],
        approximated=[name for name in known if not RULES[name].exact],
        missing=missing,
        formulas=len(re.findall(r"^- name:", _derivatives().read_text(), re.M)),
        operations=dict(_operations()),
    )


def _derivatives() -> Path:
    return Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"


def _reason(name: str) -> str:
    return next((reason for pattern, reason in _REASONS.items() if re.search(pattern, name)), "no rule yet")


def _operations() -> Iterator[tuple[str, str]]:
    with warnings.catch_warnings(action="ignore"):
        from torch.testing._internal.common_methods_invocations import op_db

        for op in op_db:
            if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu"):
                name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
                with contextlib.suppress(ImportError):  # some samples need scipy
                    node = _single_node(op)
                    if node is not None:
                        yield name, node


def _single_node(op: Any) -> str | None:
    """The node of an operation's first small real sample, if its graph has no other."""
    for count, sample in enumerate(op.sample_inputs("cpu", torch.float64, requires_grad=True)):
        if count > 2:
            return None
        outputs = op.op(sample.input, *sample.args, **sample.kwargs)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        nodes = {t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn is not None and not t.is_complex()}
        if len(nodes) == 1:
            (node,) = nodes
            if all(child is None or hasattr(child, "variable") for child, _ in node.next_functions):
                return str(node.name())
    return None


def as_markdown(coverage: Coverage) -> str:
    """The page docs/coverage.md."""
    covered = sum(node in RULES for node in coverage.operations.values())
    ruled = len(coverage.exact) + len(coverage.approximated)
    lines = [
        "# Coverage",
        "",
        "Written by `hesscale coverage` from the rule table; a test fails when it is out of date.",
        "",
        f"torch {torch.__version__.split('+')[0]}: derivatives.yaml has {coverage.formulas} formulas. "
        f"{ruled} nodes have a rule, {sum(map(len, coverage.missing.values()))} have none. Of the "
        f"{len(coverage.operations)} operations in torch's database whose graph is a single node, {covered} have a "
        f"rule ({covered / len(coverage.operations):.0%}); the others are refused with an error that names them.",
        "",
        "## Approximated inside",
        "",
        "Fused kernels of several steps; what is dropped is what is dropped when the steps stand in the model.",
        "",
        *(f"- {name}" for name in coverage.approximated),
        "",
        "## Without a rule",
        "",
    ]
    for reason in sorted(coverage.missing, key=lambda reason: (reason != "no rule yet", reason)):
        names = ", ".join(coverage.missing[reason])
        lines += [f"**{reason}** ({len(coverage.missing[reason])}): {names}", ""]
    refused = {op: node for op, node in coverage.operations.items() if node not in RULES}
    lines += ["Operations of the database among them: " + ", ".join(sorted(refused)) + ".", ""]
    lines += ["## Exact where the Hessian at their output is diagonal", "", ", ".join(coverage.exact), ""]
    return "\n".join(lines)


def coverage(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/coverage.md"),
) -> None:
    """List the operations of the installed torch that have a rule, and those that have none, as a page.

    \b
    Example:
      hesscale coverage --out docs/coverage.md
    """
    if not out.parent.is_dir():
        stop(f"there is no folder {out.parent} here: say where the page goes with --out FILE", code=2)
    try:
        page = as_markdown(measure())
    except ModuleNotFoundError as error:
        stop(f"for torch's op database, {what_to_install(error)}", code=1)
    with clear_errors(out):
        out.write_text(page, encoding="utf-8")
    typer.echo(f"wrote {out}")
