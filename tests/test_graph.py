"""The door to torch's insides: what is behind it, what works when a name is gone, and that nobody goes around it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hesscale
from hesscale import graph, plan, recomputing, traced
from hesscale.fast import workspace

LIBRARY = Path(graph.__file__).parent
DOORS = {
    LIBRARY / name for name in ("graph.py", "recomputing.py", "traced.py", "fsdp.py", "compiled/torch_compiler.py")
}

PRIVATE = re.compile(
    r"\btorch\._(?!foreach_|inductor)\w+|\b_(?:cdata|forward_cls|raw_saved_|execution_engine|fsdp_\w+)\b"
)
"""Names of torch that it does not document; ``_saved_*`` and ``_input_metadata`` are what rules are about."""


@pytest.mark.parametrize("path", sorted(LIBRARY.rglob("*.py")), ids=lambda path: str(path.relative_to(LIBRARY)))
def test_nobody_else_uses_a_private_name(path: Path) -> None:
    if path in DOORS:
        pytest.skip("this is a door")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if PRIVATE.search(line)] == []


def passes(*, checkpoints: bool = True) -> list[Tensor]:
    """Curvature of a layer that uses scratch memory, of an expression in a checkpoint, and of an attached loss."""
    torch.manual_seed(0)
    w = torch.randn(300, 300, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 300, dtype=torch.float64)
    found = []
    for _ in range(3):
        w.grad = None
        y = x @ w
        inner = checkpoint(F.silu, y, use_reentrant=False) if checkpoints else y
        hesscale.backward((inner * torch.sigmoid(inner)).pow(2).sum())
        found.append(w.curvature.clone())  # type: ignore[attr-defined]
    hesscale.attach((x @ w).tanh().sum()).backward()
    return [*found, w.curvature]  # type: ignore[attr-defined]


OPTIONAL: dict[str, tuple[Any, str, Any]] = {
    "reading the group of a recomputation": (recomputing, "_get_group", None),
    "setting it": (recomputing, "_set_group", None),
    "looking at saved tensors": (graph, "saved_names", lambda kind: ()),
    "knowing transforms": (graph, "_is_wrapped", None),
    "knowing that it is traced": (traced, "_get_mode", None),
    "counting users of memory": (workspace, "storage_users", None),
    "the memory's address": (torch.UntypedStorage, "_cdata", None),
    "the class of a Function": (plan, "function_of", lambda kind: None),
}


@pytest.mark.parametrize("gone", OPTIONAL.values(), ids=OPTIONAL.keys())
def test_a_pass_does_without(gone: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = passes()
    monkeypatch.setattr(*gone, raising=False)
    assert all(map(torch.equal, passes(), expected))


def test_checkpoints_alone_are_lost_where_torch_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = passes(checkpoints=False)
    monkeypatch.delattr(checkpoints._Holder, "handles")
    monkeypatch.setattr(recomputing, "_teach_checkpoints", lambda: None)
    assert all(map(torch.equal, passes(checkpoints=False), expected))
    with pytest.raises(RuntimeError, match="already unpacked once"):
        passes()


def test_the_import_does_without() -> None:
    names = ("_get_graph_exec_group", "_set_graph_exec_group", "_storage_Use_Count")
    code = f"import torch; [delattr(torch._C, name) for name in {names}]; import hesscale"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", graph.REQUIRED)
def test_the_import_names_what_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, name)
    with pytest.raises(ImportError, match=rf"does not work with torch {torch.__version__[:4]}.*it has no {name}$"):
        graph.refuse_without(*graph.REQUIRED)


def test_rows_describe_a_graph_without_its_nodes() -> None:
    def rows() -> tuple[graph.Row, ...]:
        x = torch.ones(2, 3, requires_grad=True)
        root = (x.exp() * x).sum().grad_fn
        assert root is not None
        return graph.graph_behind(root).rows

    first, second = rows(), rows()
    assert first == second
    names = [row[0] for row in first]
    assert names == ["SumBackward0", "MulBackward0", "ExpBackward0", "torch::autograd::AccumulateGrad"]
    assert first[1][2] == ((2, 0), (3, 0))
    assert first[2][3] == (((2, 3), torch.float32, torch.device("cpu")),)


def test_nodes_of_complex_tensors_are_marked() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    root = torch.view_as_real(torch.view_as_complex(x) * 1j).sum().grad_fn
    assert root is not None
    marked = [row[0].endswith("(complex)") for row in graph.graph_behind(root).rows]
    assert marked == [False, True, True, True, False]
