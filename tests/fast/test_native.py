"""How the update in C++ is built, kept and done without."""

import ctypes
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import hesscale
from hesscale.fast import native
from hesscale.optim import updates

from ..optim.native_calls import calls as calls
from ..optim.native_calls import turned_on as turned_on
from ..optim.small import assert_same, network, parameters, train


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache directory, for a library that is built again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.library.cache_clear()
    updates._warn_once.cache_clear()
    yield tmp_path / "cache" / "hesscale"
    native.library.cache_clear()
    updates._warn_once.cache_clear()


def trained(**options: Any) -> list[Tensor]:
    model = network()
    train(model, hesscale.AdaHesScale(model.parameters(), every=2, **options))
    return parameters(model)


def test_the_library_is_built_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library() is not None
    (kept,) = fresh.iterdir()
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    native.library.cache_clear()
    monkeypatch.setattr(native, "_SECONDS", 0.0)  # whoever compiled would run out of time
    assert native.library() is not None
    assert [*fresh.iterdir()] == [kept]


def test_a_damaged_library_is_built_again(fresh: Path) -> None:
    assert native.library() is not None
    (kept,) = fresh.iterdir()
    copy = fresh.parent / "copy"
    kept.rename(copy)
    kept.write_bytes(copy.read_bytes()[:1000])
    native.library.cache_clear()
    assert native.library() is not None
    ctypes.CDLL(str(kept))


def test_two_processes_at_once_share_it(fresh: Path) -> None:
    code = "from hesscale.fast import native; assert native.library() is not None"
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len([*fresh.iterdir()]) == 1


def test_a_home_that_cannot_be_written_to(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    assert native.library() is not None
    assert len([*(tmp_path / f"hesscale-{os.getuid()}").iterdir()]) == 1


def test_a_directory_of_others_is_not_used(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    elsewhere = tmp_path / f"hesscale-{os.getuid()}"
    elsewhere.mkdir(mode=0o700)
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    assert native.library() is not None
    assert not [*fresh.iterdir()]
    assert len([*elsewhere.iterdir()]) == 1


@pytest.mark.parametrize("compiler", ["/bin/false", None], ids=["fails", "is not there"])
def test_without_a_compiler_the_default_says_nothing_and_fused_warns_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
) -> None:
    monkeypatch.setattr(native, "_compilers", lambda: iter([compiler] if compiler else []))
    assert_same(trained(), trained(foreach=False))
    with pytest.warns(UserWarning, match="falling back to foreach") as caught:
        found = trained(fused=True)
    assert len(caught) == 1
    assert_same(found, trained(foreach=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(fused=True)


def test_a_compiler_that_does_not_know_this_processor(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_TUNED", "-march=none-of-these")
    assert native.library() is not None


def test_the_variable_of_the_environment_chooses_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert next(native._compilers()) == "/bin/false"


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setenv("HESSCALE_PLAIN", "1")
    native.library.cache_clear()
    try:
        assert_same(trained(), trained(foreach=False))
        assert not calls
    finally:
        native.library.cache_clear()
