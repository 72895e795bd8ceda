"""Every public name is on the page of the API, and has a docstring with an example that runs."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscale
import hesscale.applications.laplace
import hesscale.applications.step_size
from hesscale.rules import RULES

API = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^\.\. auto(?:class|function|exception|method):: (hesscale\.\S+)$", API, re.M)
PACKAGES = (hesscale, hesscale.optim, hesscale.applications)


def exported(package: ModuleType) -> set[str]:
    """The names that a package hands on (`from .file import name as name`), its submodules left out."""
    found = re.findall(r"^from \.\S* import (\w+) as \1$", inspect.getsource(package), re.M)
    return {f"{package.__name__}.{name}" for name in found if not isinstance(getattr(package, name), ModuleType)}


def found_at(path: str) -> Any:
    value: Any = hesscale
    for part in path.split(".")[1:]:
        value = getattr(value, part)
    return value


def test_the_page_has_every_name_once() -> None:
    public = set().union(*map(exported, PACKAGES))
    same = {id(found_at(path)) for path in DOCUMENTED}  # hesscale.optim.AdaHesScale is hesscale.AdaHesScale
    assert not [path for path in sorted(public) if id(found_at(path)) not in same], "add these to docs/api.md"
    assert len(set(DOCUMENTED)) == len(DOCUMENTED)


@pytest.mark.parametrize("path", DOCUMENTED)
def test_example_runs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RULES, "_rows", dict(RULES._rows))
    torch.manual_seed(0)
    names = {"torch": torch, "nn": nn, "F": F, "hesscale": hesscale}
    text = inspect.getdoc(found_at(path))
    test = doctest.DocTestParser().get_doctest(text or "", names, path, None, None)
    assert test.examples, f"{path} has no example"
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)
