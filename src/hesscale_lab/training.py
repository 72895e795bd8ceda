"""One training, read top to bottom: settings, the loop, what is measured and kept. A run can be killed at any time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from . import checkpoints
from .batches import Data, generator_for
from .batches import load as load_data
from .optimizers import backward, make_optimizer, optimizer_named, warm_up
from .processes import Team
from .runs import CONFIG, Run, keep_records, open_run
from .tasks.classifiers import seed_dropout
from .tasks.table import Task, task_named

Watch = Callable[[Mapping[str, Any]], None]
_BETWEEN_WATCHES = 0.25  # seconds


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
    subset: int | None = None  # of the training images
    fields: tuple[tuple[str, Any], ...] = ()  # of the task, with values other than the table's

    def as_config(self) -> dict[str, Any]:
        """The settings as config.json holds them, with the command that repeats the run."""
        return {"kind": "train", "command": self._command(), **asdict(self), "fields": dict(sorted(self.fields))}

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
        words = [f"--{name} {value}" for name, value in options.items() if value is not None]
        words += [f"--field {name}={value}" for name, value in sorted(self.fields)]
        return " ".join(["hesscale train", self.task, *words])


def folder_of(settings: Settings, root: Path) -> Path:
    """Where a run of these settings belongs, such as root/mnist-mlp/Adam/lr1e-04-b0-b0.9999-e20/seed0."""
    parts = [
        f"lr{_number(settings.lr, '.0e')}",
        f"b{_number(settings.beta1, 'g')}",
        f"b{_number(settings.beta2, 'g')}",
        f"e{settings.epochs}",
        *([] if settings.subset is None else [f"n{settings.subset}"]),
        *(f"{name}={value}" for name, value in sorted(settings.fields)),
    ]
    return root / settings.task / settings.optimizer / "-".join(parts) / f"seed{settings.seed}"


def _number(value: float, short: str) -> str:
    text = format(value, short)
    return text if float(text) == value else repr(float(value))


def is_finished(run: Run) -> bool:
    """Whether the training came to its end, or was stopped by a value that was not finite."""
    return any(record["kind"] == "end" for record in run.records)


def train(
    settings: Settings,
    folder: Path,
    *,
    data: Path | None = None,
    watch: Watch | None = None,
    tensorboard: bool = False,
) -> Run:
    """The finished run in this folder: trained from the start, or on from where it was stopped.

    ``data``: where the images are; without it they are downloaded. ``watch`` is told how far it is a few times a
    second. With several processes, as started by torchrun, each takes its part of every batch.
    """
    task = task_named(settings.task).with_fields(settings.fields)
    optimizer_named(settings.optimizer)
    team = Team.current()
    config = settings.as_config()
    if team.share(lambda: (folder / CONFIG).exists() and is_finished(open_run(folder, config))):
        return Run(folder)
    images = load_data(task, seed=settings.seed, subset=settings.subset, folder=data)
    run = open_run(folder, config) if team.is_first else Run(folder)  # not before the data is known to be good
    training = _Training(task, settings, images, team)
    training.restore(team.share(lambda: checkpoints.load(folder)))
    if team.is_first:
        keep_records(run, lambda record: record["epoch"] <= training.epoch)
    with _board(folder, wanted=tensorboard and team.is_first, after=training.epoch) as board:
        _train(training, run, watch or (lambda progress: None), board)
    if team.is_first:
        checkpoints.remove(folder)
    team.wait()
    return run


def _train(training: _Training, run: Run, watch: Watch, board: _Board) -> None:
    epochs = training.settings.epochs
    try:
        if training.epoch < 0:
            training.epoch = 0
            _record(training, run, board, last=epochs == 0)
        while training.epoch < epochs:
            training.run_epoch(watch)
            _record(training, run, board, last=training.epoch == epochs)
    except NotFinite:
        if training.team.is_first:
            run.add({"kind": "end", "reason": "not finite", "epoch": training.epoch, "step": training.steps})


def _record(training: _Training, run: Run, board: _Board, *, last: bool) -> None:
    """Measures, and writes first the line, then the checkpoint: a kill between them repeats the epoch, and the line."""
    measured = training.team.share(training.measure)
    if not all(math.isfinite(value) for value in measured.values()):
        raise NotFinite
    if not training.team.is_first:
        return
    epoch = {"kind": "epoch", "epoch": training.epoch, "steps": training.steps, "seconds": training.seconds}
    end = {"kind": "end", "reason": "finished", "epoch": training.epoch, "step": training.steps}
    run.add({**epoch, **measured}, *([end] if last else []))
    board.add(measured, training.epoch)
    if not last:
        checkpoints.save(run.folder, training.state())


class NotFinite(ArithmeticError):
    """A loss, a gradient, a curvature or a parameter is infinite or not a number."""


class _Training:
    """A network in training: how far it is, one epoch, one measurement."""

    def __init__(self, task: Task, settings: Settings, data: Data, team: Team) -> None:
        self.task, self.settings, self.data, self.team = task, settings, data, team
        self.epoch, self.steps, self.seconds = -1, 0, 0.0
        self.model = task.make(generator_for(settings.seed, "weights"))
        self.optimizer = self._optimizer()
        self.shared = team.wrap(self.model, self.optimizer, batch=task.batch)

    def _optimizer(self) -> Optimizer:
        if self.task.fused:
            warm_up(self.settings.optimizer)
        return make_optimizer(
            self.settings.optimizer,
            self.model,
            lr=self.settings.lr,
            betas=(self.settings.beta1, self.settings.beta2),
            weight_decay=self.task.weight_decay,
            fused=self.task.fused,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. Generators are not in it: they are made anew for each epoch."""
        progress = {"epoch": self.epoch, "steps": self.steps, "seconds": self.seconds}
        return {**progress, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Goes back to such a state, if there is one."""
        if state is not None:
            self.epoch, self.steps, self.seconds = state["epoch"], state["steps"], state["seconds"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    def run_epoch(self, watch: Watch) -> None:
        """One pass over the training images."""
        self.epoch += 1
        seed, rank = self.settings.seed, self.team.rank
        seed_dropout(self.model, generator_for(seed, "dropout", self.epoch, rank))
        probes = generator_for(seed, "curvature", self.epoch)
        self.model.train()
        progress = _Progress(self, watch)
        before, start = self.seconds, time.perf_counter()
        for batch in self.data.epoch(self.epoch):
            x, y = (self.team.part(tensor) for tensor in batch)
            loss, logits = self._step(x, y, probes)
            self.seconds = before + time.perf_counter() - start
            progress.note(loss, logits, y)

    def _step(self, x: Tensor, y: Tensor, probes: torch.Generator) -> tuple[float, Tensor]:
        logits = self.shared(x)
        loss = F.cross_entropy(logits, y)
        value = self.team.average(loss.detach())
        if not math.isfinite(value):
            raise NotFinite
        self.optimizer.zero_grad()
        backward(self.optimizer, loss, generator=probes)
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if "is not finite" in str(error):
                raise NotFinite from error
            raise
        self.steps += 1
        return value, logits.detach()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Mean losses, L2 term included, and accuracies of the three sets."""
        self.model.eval()
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        penalty = 0.5 * self.task.weight_decay * sum(float(p.double().square().sum()) for p in weights)
        found: dict[str, float] = {}
        for name, pieces in self.data.measured(self.epoch).items():
            loss = right = count = 0.0
            for x, y in pieces:
                logits = self.model(x)
                loss += float(F.cross_entropy(logits, y, reduction="sum"))
                right += float((logits.argmax(1) == y).sum())
                count += len(y)
            found |= {f"{name}_loss": loss / count + penalty, f"{name}_accuracy": right / count}
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            found["train_loss"] = math.nan  # such as a unit at minus infinity, which a ReLU hides
        return found


class _Progress:
    """Tells ``watch`` about an epoch, not too often; losses and accuracies are averages over the epoch so far."""

    def __init__(self, training: _Training, watch: Watch) -> None:
        self.training, self.watch = training, watch
        self.first, self.began = training.steps, training.seconds
        self.loss = self.right = self.seen = 0.0
        self.told = -math.inf

    def note(self, loss: float, logits: Tensor, y: Tensor) -> None:
        """Takes in a step."""
        training = self.training
        done = training.steps - self.first
        self.loss += loss
        self.right += float((logits.argmax(1) == y).sum())
        self.seen += len(y)
        now = time.perf_counter()
        if now - self.told < _BETWEEN_WATCHES and done < training.data.steps:
            return
        self.told = now
        self.watch(
            {
                "epoch": training.epoch,
                "epochs": training.settings.epochs,
                "step": done,
                "steps_per_epoch": training.data.steps,
                "loss": self.loss / done,
                "accuracy": self.right / self.seen,
                "seconds_per_step": (training.seconds - self.began) / done,
            }
        )


class _Board:
    """TensorBoard's files beside a run, if wanted."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def __enter__(self) -> _Board:
        return self

    def __exit__(self, *error: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def add(self, measured: Mapping[str, float], epoch: int) -> None:
        """Adds what was measured after an epoch."""
        if self.writer is not None:
            for name, value in measured.items():
                part, kind = name.split("_")
                self.writer.add_scalar(f"{kind}/{part}", value, epoch)


def _board(folder: Path, *, wanted: bool, after: int) -> _Board:
    if not wanted:
        return _Board(None)
    from torch.utils.tensorboard import SummaryWriter

    return _Board(SummaryWriter(folder, purge_step=after + 1))
