"""The command's first and last moments: help at once, Ctrl-C during imports, output that nobody reads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hesscale_lab import cli
from hesscale_lab.cli import COMMANDS, app
from hesscale_lab.startup import what_to_install

HESSCALE = [sys.executable, "-m", "hesscale_lab"]


def test_help_imports_neither_torch_nor_what_needs_it() -> None:
    code = "import sys\nfrom hesscale_lab.__main__ import main\ntry:\n main()\nfinally:\n print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)
    imported = set(result.stdout.splitlines()[-1].strip("[]").replace("'", "").split(", "))
    assert "hesscale_lab.cli" in imported
    assert not imported & {"torch", "numpy", "matplotlib", "ray", "hesscale"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_in_its_help_what_the_list_says(command: str) -> None:
    everything, own = (CliRunner().invoke(app, [*name, "--help"]).stdout for name in ([], [command]))
    summary = everything.partition(f"\n  {command} ")[2].split()[:6]
    assert len(summary) == 6
    assert " ".join(summary) in " ".join(own.split())


def test_a_command_that_does_not_exist_is_refused_with_a_likely_one() -> None:
    result = CliRunner().invoke(app, ["trian"])
    assert result.exit_code == 2
    assert "No such command 'trian'. Did you mean 'train'" in result.stderr


def test_a_missing_package_is_one_line_and_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, package: str) -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich.console")

    monkeypatch.setattr(cli, "import_module", missing)
    result = CliRunner().invoke(app, ["report", "."])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "hesscale: this needs rich: pip install 'hesscale[lab]'\n"


SLOW_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
        return None
sys.meta_path.insert(0, Finder())
from hesscale_lab.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["typer", "torch", "torch.nn.functional", "numpy", "rich.progress"])
def test_ctrl_c_during_imports_is_one_line_and_code_130(name: str, tmp_path: Path) -> None:
    arguments = ["train", "digits", "--epochs", "0", "--out", str(tmp_path / "runs")]
    code = SLOW_IMPORT.format(name=name)
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "hesscale: stopped before anything was begun\n"
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_anywhere_else_is_one_line_and_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(name: str, package: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", pressed)
    result = CliRunner().invoke(app, ["report", "."])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "hesscale: stopped\n")


def test_ctrl_c_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """As under nohup, or in the background of a script."""
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SLOW_IMPORT.format(name="torch")
    result = subprocess.run([sys.executable, "-c", code, "train", "--epochs", "0", "--out", str(tmp_path)])
    assert result.returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["train", "digits", "--epochs", "0"]])
@pytest.mark.parametrize("both", [False, True])
def test_output_that_nobody_reads_is_no_traceback(arguments: list[str], both: bool, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    errors = write if both else subprocess.PIPE
    result = subprocess.run([*HESSCALE, *arguments], cwd=tmp_path, stdout=write, stderr=errors, text=True)
    os.close(write)
    assert result.returncode == 1
    assert "Traceback" not in (result.stderr or "") and "Exception" not in (result.stderr or "")
    assert "cannot write" not in (result.stderr or "")


def test_ctrl_c_in_a_training_is_one_line_and_it_goes_on(tmp_path: Path) -> None:
    arguments = [*HESSCALE, "train", "digits", "--epochs", "500", "--out", str(tmp_path)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "epoch 2/" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate()
    assert (process.returncode, printed) == (130, "")
    assert said.splitlines()[-1] == f"hesscale: stopped; the same command goes on from what is in {tmp_path}"
    assert "Traceback" not in said
    assert len(list(tmp_path.rglob("checkpoint.pt"))) == 1


@pytest.mark.parametrize("missing", ["typer", "rich", "matplotlib"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from hesscale_lab.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "quality", "--help"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"hesscale: this needs {missing}: pip install 'hesscale[lab]'\n"


def test_the_installed_command_is_the_one_that_says_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"hesscale": "hesscale_lab.__main__:main"}
    imported_as = {"scikit-learn": "sklearn", "pillow": "PIL"}
    wanted = [re.split("[<>=]", one)[0] for one in project["optional-dependencies"]["lab"]]
    for module in (imported_as.get(name, name) for name in wanted):
        assert what_to_install(ModuleNotFoundError(name=f"{module}.part")).endswith("pip install 'hesscale[lab]'")
    assert what_to_install(ModuleNotFoundError(name="scipy")) == "this needs scipy: pip install scipy"
    with pytest.raises(ModuleNotFoundError):  # a mistake of ours is not to be installed away
        what_to_install(ModuleNotFoundError(name="hesscale_lab.nothing"))
