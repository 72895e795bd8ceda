"""What a training depends on: its settings, the command that repeats it, and the folder it belongs in."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from .options import Options, flags, label, words
from .plugins import Plugin


@dataclass(frozen=True)
class Settings:
    """Everything a result depends on."""

    task: str
    optimizer: str
    lr: float
    beta1: float
    beta2: float
    seed: int
    epochs: int
    subset: int | None = None  # of the training examples
    fields: tuple[tuple[str, Any], ...] = ()  # of the task, with values other than the table's
    processes: int = 1  # that share each batch
    options: Options = ()  # of the optimizer, where they are not what is usual
    plugin: Plugin | None = None  # where task or optimizer come from
    text: str | None = None  # the digest of what it learns from, of a task that learns from a file of the user's

    @property
    def label(self) -> str:
        """The optimizer with its options."""
        return label(self.optimizer, self.options)

    def as_config(self) -> dict[str, Any]:
        """The settings as config.json holds them, with the command that repeats the run."""
        config = {"kind": "train", "command": self._command(), **asdict(self), "fields": dict(sorted(self.fields))}
        config["options"] = dict(self.options)
        for name in ("options", "plugin", "text"):  # without them a config is as it was before there were any
            if not config[name]:
                del config[name]
        return config

    def _command(self) -> str:
        options = {
            "optimizer": self.optimizer,
            "lr": self.lr,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "seed": self.seed,
            "epochs": self.epochs,
            "subset": self.subset,
        }
        said = [f"--{name} {quote(str(value))}" for name, value in options.items() if value is not None]
        said += flags(self.options)
        said += [f"--plugin {quote(self.plugin.name)}"] if self.plugin else []
        said += [f"--field {quote(f'{name}={value}')}" for name, value in sorted(self.fields)]
        together = f"torchrun --nproc-per-node {self.processes} -m hesscale_lab.cli"
        return " ".join(["hesscale" if self.processes == 1 else together, "train", self.task, *said])


def folder_of(settings: Settings, root: Path) -> Path:
    """Where a run of these settings belongs, such as root/mnist-mlp/Adam/lr1e-04-b0-b0.9999-e20/seed0."""
    parts = [
        f"lr{_number(settings.lr, '.0e')}",
        f"b{_number(settings.beta1, 'g')}",
        f"b{_number(settings.beta2, 'g')}",
        f"e{settings.epochs}",
        *([] if settings.subset is None else [f"n{settings.subset}"]),
        *([] if settings.processes == 1 else [f"p{settings.processes}"]),
        *words(settings.options),
        *(f"{name}={value}".replace("/", "_") for name, value in sorted(settings.fields)),
    ]
    return root / settings.task / settings.optimizer / "-".join(parts) / f"seed{settings.seed}"


def _number(value: float, short: str) -> str:
    text = format(value, short)
    return text if float(text) == value else repr(float(value))
