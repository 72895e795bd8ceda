"""Who may import whom: every file of the library sees only the layers below its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
LIBRARY = SOURCE / "hesscale"
RULES = LIBRARY / "rules"

LAYERS = (
    "errors",
    "traced",
    "recomputing",
    "graph",
    "fsdp",
    "fast",
    "wiring",
    "double_backward",
    "rules",
    "regions",
    "columns",  # beside the walk, not on it: backward seeds them, estimators and optimizers draw them
    "plan",
    "leaves",
    "walk",
    "backward",
    "inspection",
    "estimators",
    "testing",
    "compiled",
    "distributed",
    "optim",
    "applications",
)
"""Low to high; above them all is hesscale_lab."""

NEVER = {
    "rules": {"graph", "wiring"},  # a rule is mathematics: it gets a node, and does not know how nodes are wired
    "optim": {"estimators"},  # an optimizer reads p.curvature, whoever estimated it
}
FOREIGN = {"numpy", "matplotlib", "hesscale_lab"}
SHARED_BY_RULES = ("calculus", "probabilities", "families", "probing", "fallback", "table")
"""What rule files stand on, low to high."""

FILES = sorted(LIBRARY.rglob("*.py"))
INSIDE = [path for path in FILES if path != LIBRARY / "__init__.py"]


def imported(path: Path) -> Iterator[str]:
    """The full dotted name of everything a file imports, wherever in the file, relative imports resolved."""
    package = path.relative_to(SOURCE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, node.module) if node.module else base
            # `from . import graph` names a module, `from .graph import trace` does not: the tests look at the front
            yield from (".".join((*module, alias.name)) for alias in node.names)


def own_imports(path: Path, *, below: str = "hesscale") -> set[str]:
    """The names right below a package that a file imports from; the package's own name for `import package`."""
    names = {name for name in imported(path) if name == below or name.startswith(f"{below}.")}
    return {name.removeprefix(below).removeprefix(".").split(".")[0] or below for name in names}


def layer_of(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


def short(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def test_every_file_has_a_layer() -> None:
    homeless = [short(path) for path in INSIDE if layer_of(path) not in LAYERS]
    assert not homeless, f"give these a place in LAYERS: {homeless}"


@pytest.mark.parametrize("path", INSIDE, ids=short)
def test_a_file_imports_only_lower_layers(path: Path) -> None:
    own = layer_of(path)
    allowed = {*LAYERS[: LAYERS.index(own)]} - NEVER.get(own, set())
    if path == RULES / "calculus.py":
        allowed.add("graph")  # it calls nodes for all the others
    if path.parent != LIBRARY:
        allowed.add(own)  # files of one package may know each other; rules/ has a stricter test below
    assert own_imports(path) <= allowed


@pytest.mark.parametrize("path", FILES, ids=short)
def test_the_library_needs_torch_only(path: Path) -> None:
    assert FOREIGN.isdisjoint(name.split(".")[0] for name in imported(path))


@pytest.mark.parametrize("path", sorted(set(RULES.glob("*.py")) - {RULES / "__init__.py"}), ids=short)
def test_rule_files_do_not_know_each_other(path: Path) -> None:
    shared = path.stem in SHARED_BY_RULES
    allowed = SHARED_BY_RULES[: SHARED_BY_RULES.index(path.stem)] if shared else SHARED_BY_RULES
    assert own_imports(path, below="hesscale.rules") <= set(allowed)


def test_every_rule_file_is_loaded() -> None:
    files = {path.stem for path in RULES.glob("*.py")} - {"__init__"}
    assert files - set(SHARED_BY_RULES) <= own_imports(RULES / "__init__.py", below="hesscale.rules")
