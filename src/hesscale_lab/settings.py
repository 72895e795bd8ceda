"""What a training depends on: its settings, the command that repeats it, and its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any

from .options import Options, as_text, label, option_words
from .plugins import Plugin

LARGEST = 1e100
"""Numbers beyond it cannot be squared."""
MOST = 10**9 - 1
"""The largest seed, and the largest number of epochs or examples."""


def is_step_size(lr: float) -> bool:
    """Whether a run may have this lr."""
    return 0 < lr < LARGEST


@dataclass(frozen=True)
class Settings:
    """Everything that a training's result depends on."""

    task: str
    optimizer: str
    lr: float
    beta1: float
    beta2: float
    seed: int
    epochs: int
    subset: int | None = None  # how many training examples to use
    fields: tuple[tuple[str, Any], ...] = ()  # of the task, where they differ from the table's
    processes: int = 1  # that share each batch
    options: Options = ()
    plugin: Plugin | None = None  # the file that defines the task or the optimizer
    text: str | None = None  # the digest of the text, for a task that learns from a file of the user's

    @property
    def label(self) -> str:
        """The optimizer with its options."""
        return label(self.optimizer, self.options)

    def as_config(self) -> dict[str, Any]:
        """The content of config.json: the settings, and the command that repeats the run."""
        config = {"kind": "train", "command": self._command(), **asdict(self)}
        return config | {"fields": dict(sorted(self.fields)), "options": dict(self.options)}

    def _command(self) -> str:
        names = ("optimizer", "lr", "beta1", "beta2", "seed", "epochs", "subset")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        words = [f"--{name} {quote(str(value))}" for name, value in given.items()]
        words += [f"--{name.replace('_', '-')} {as_text(value)}" for name, value in self.options]
        words += [f"--plugin {quote(self.plugin.name)}"] if self.plugin else []
        words += [f"--field {quote(f'{name}={value}')}" for name, value in sorted(self.fields)]
        together = f"torchrun --nproc-per-node {self.processes} -m hesscale_lab.cli"
        return " ".join(["hesscale" if self.processes == 1 else together, "train", self.task, *words])


def settings_of(config: Mapping[str, Any]) -> Settings:
    """The settings in a run's config.json."""
    values = {field.name: config[field.name] for field in fields(Settings)}
    pairs = {name: tuple(sorted(values[name].items())) for name in ("fields", "options")}
    plugin = values["plugin"] and Plugin(**values["plugin"])
    return Settings(**{**values, **pairs, "plugin": plugin})


def folder_of(settings: Settings, root: Path) -> Path:
    """The folder of a run, such as root/mnist-mlp/Adam/lr1e-04-b0-b0.9999-e20/seed0."""
    parts = [
        f"lr{_short(settings.lr, '.0e')}",
        f"b{_short(settings.beta1, 'g')}",
        f"b{_short(settings.beta2, 'g')}",
        f"e{settings.epochs}",
        *([] if settings.subset is None else [f"n{settings.subset}"]),
        *([] if settings.processes == 1 else [f"p{settings.processes}"]),
        *option_words(settings.options),
        *(f"{name}={value}".replace("/", "_") for name, value in sorted(settings.fields)),
    ]
    return root / settings.task / settings.optimizer / "-".join(parts) / f"seed{settings.seed}"


def _short(value: float, form: str) -> str:
    text = format(value, form)
    return text if float(text) == value else repr(float(value))
