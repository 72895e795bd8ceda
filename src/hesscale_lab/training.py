"""One training, read top to bottom: the loop, what is measured and kept. A run can be killed at any time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import checkpoints
from .batches import Data, generator_for
from .batches import load as load_data
from .compact import find_run
from .histories import is_finished
from .locks import alone
from .optimizers import backward, kernels_for, leaps_expected, make_optimizer, require_fitting, warm_up
from .plugins import Plugin, load_plugin, named_in_errors
from .processes import Team
from .runs import DamagedRunError, Run, differences, open_run, replace_records, require_same
from .settings import Settings
from .tasks.archives import DataError
from .tasks.classifiers import seed_dropout
from .tasks.table import task_named
from .tasks.task import Task

Watch = Callable[[Mapping[str, Any]], None]
_BETWEEN_WATCHES = 0.25  # seconds
_FOLLOWS = ("command",)  # from the other settings, however it is written


def train(
    settings: Settings,
    folder: Path,
    *,
    data: Path | None = None,
    watch: Watch | None = None,
    each_epoch: Watch | None = None,
    tensorboard: bool = False,
    wait: bool = False,
) -> Run:
    """The finished run in this folder: trained from the start, or on from where it was stopped.

    ``data``: where the examples are; without it they are downloaded. ``watch`` is told how far it is a few times a
    second, ``each_epoch`` what was measured after an epoch. With several processes, as started by torchrun, each takes
    its part of every batch. InUseError if another training works in the folder, or ``wait`` for its end.
    """
    load_plugin(settings.plugin)
    task = task_named(settings.task).with_fields(settings.fields)
    require_fitting(settings.optimizer, settings.options)
    settings = _with_text(settings, task.digest(data))
    team, run, config = Team.current(), find_run(folder), settings.as_config()
    if team.count != settings.processes:
        raise ValueError(f"the settings are for {settings.processes} processes, not {team.count}")
    if team.share(lambda: _has_ended(run, config)):
        with suppress(OSError):  # of a run that was killed in its last moment; the folder may be read-only by now
            checkpoints.remove(folder)
        return run
    with named_in_errors(settings.plugin), ExitStack() as lock:
        examples = load_data(task, seed=settings.seed, subset=settings.subset, folder=data)
        training = _Training(task, settings, examples, team)
        # not before data and settings are known to be good: it makes the folder
        team.share(lambda: lock.enter_context(alone(folder, wait=wait)))
        if not team.share(lambda: _has_ended(run, config)):  # by now, perhaps, in another process
            training.restore(team.share(lambda: _take_up(run, config)), folder / checkpoints.NAME)
            with leaps_expected(), _board(folder, wanted=tensorboard and team.is_first, after=training.epoch) as board:
                _train(training, run, _Listeners(watch or _nobody, each_epoch or _nobody, board))
        if team.is_first:
            checkpoints.remove(folder)
        team.wait()
    return run


def _with_text(settings: Settings, found: str | None) -> Settings:
    """The settings with the digest of the text that was found; DataError if they are for another."""
    if settings.text and found and settings.text != found:
        raise DataError(f"the text here (digest {found}) is not that of these settings ({settings.text}): get that one")
    return replace(settings, text=settings.text or found)


def _has_ended(run: Run, config: Mapping[str, Any]) -> bool:
    """Whether nothing is left to do. Changes nothing: another process may be at work in the folder."""
    if not run.exists:
        return False
    require_same(run, config, free=_FOLLOWS)
    try:
        return is_finished(run)
    except DamagedRunError:
        if (run.folder / checkpoints.NAME).exists():  # it holds what was measured as well
            return False
        raise


def _take_up(run: Run, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state to go on from, if there is one, with metrics.jsonl as it was then: no line too many and none lost."""
    path = run.folder / checkpoints.NAME
    state = checkpoints.load(path)
    if state is not None and not _is_of(state, config):
        raise checkpoints.damaged(path)
    open_run(run.folder, config, free=_FOLLOWS)
    replace_records(run, state["records"] if state else [])
    return state


def _is_of(state: object, config: Mapping[str, Any]) -> bool:
    match state:
        case {"config": dict(found), "records": _}:
            return not differences(config, found, free=_FOLLOWS)
    return False


def _train(training: _Training, run: Run, listeners: _Listeners) -> None:
    epochs = training.settings.epochs
    try:
        if training.epoch < 0:
            training.epoch = 0
            _record(training, run, listeners)
        while training.epoch < epochs:
            training.run_epoch(listeners.watch)
            _record(training, run, listeners)
    except NotFinite:
        if training.team.is_first:
            run.add({"kind": "end", "reason": "not finite", "epoch": training.epoch, "step": training.steps})


def _record(training: _Training, run: Run, listeners: _Listeners) -> None:
    """Measures, and writes first the line, then the checkpoint: a kill between them repeats the epoch, and the line.

    After the last epoch the weights come before the line, which says that all is done.
    """
    measured = training.team.share(training.measure)
    if not all(math.isfinite(value) for value in measured.values()):
        raise NotFinite
    if not training.team.is_first:
        return
    epoch, steps = training.epoch, training.steps
    record = {"kind": "epoch", "epoch": epoch, "steps": steps, "seconds": training.seconds, **measured}
    training.records.append(record)
    if epoch == training.settings.epochs:
        checkpoints.save(run.folder / checkpoints.WEIGHTS, training.model.state_dict())
        run.add(record, {"kind": "end", "reason": "finished", "epoch": epoch, "step": steps})
    else:
        run.add(record)
        checkpoints.save(run.folder / checkpoints.NAME, training.state())
    listeners.board.add(measured, epoch)
    listeners.each_epoch(record)


def trained_model(folder: Path) -> nn.Module:
    """The network of a finished run with its final weights, as for evaluation; FileNotFoundError if it has none."""
    config, path = find_run(folder).config, folder / checkpoints.WEIGHTS
    load_plugin(Plugin(**config["plugin"]) if "plugin" in config else None)
    model = task_named(config["task"]).with_fields(tuple(config["fields"].items())).make(torch.Generator())
    weights = checkpoints.load(path)
    if weights is None:
        raise FileNotFoundError(f"{path} is not there: a run keeps its weights once it has finished")
    model.load_state_dict(weights)
    return model.eval()


class NotFinite(ArithmeticError):
    """A loss, a gradient, a curvature or a parameter is infinite or not a number."""


class _Training:
    """A network in training: how far it is, one epoch, one measurement."""

    def __init__(self, task: Task, settings: Settings, data: Data, team: Team) -> None:
        self.task, self.settings, self.data, self.team = task, settings, data, team
        self.epoch, self.steps, self.seconds = -1, 0, 0.0
        self.records: list[dict[str, Any]] = []  # of the epochs so far
        self.model = task.make(generator_for(settings.seed, "weights"))
        self.optimizer = self._optimizer()
        self.shared = team.wrap(self.model, self.optimizer, batch=task.batch)

    def _optimizer(self) -> Optimizer:
        if self.task.fused:
            warm_up(self.settings.optimizer, self.settings.options)
        return make_optimizer(
            self.settings.optimizer,
            self.model,
            lr=self.settings.lr,
            betas=(self.settings.beta1, self.settings.beta2),
            weight_decay=self.task.weight_decay,
            fused=self.task.fused,
            options=self.settings.options,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. Generators are not in it: they are made anew for each epoch."""
        return {
            "config": self.settings.as_config(),
            "records": self.records,
            "seconds": self.seconds,
            "steps": self.steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any] | None, path: Path) -> None:
        """Goes back to such a state, if there is one, read from this file."""
        if state is None:
            return
        try:
            self.records, self.steps, self.seconds = state["records"], state["steps"], state["seconds"]
            self.epoch = len(self.records) - 1
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise checkpoints.damaged(path) from error

    def run_epoch(self, watch: Watch) -> None:
        """One pass over the training examples."""
        self.epoch += 1
        seed, rank = self.settings.seed, self.team.rank
        seed_dropout(self.model, generator_for(seed, "dropout", self.epoch, rank))
        probes = generator_for(seed, "curvature", self.epoch)
        self.model.train()
        progress = _Progress(self, watch)
        before, start = self.seconds, time.perf_counter()
        for batch in self.data.epoch(self.epoch):
            x, y = (self.team.part(tensor) for tensor in batch)
            loss, outputs = self._step(x, y, probes)
            self.seconds = before + time.perf_counter() - start
            progress.note(loss, outputs, y)

    def _step(self, x: Tensor, y: Tensor, probes: torch.Generator) -> tuple[float, Tensor]:
        with kernels_for(self.settings.optimizer):
            outputs = self.shared(x)
        loss = self.task.loss(outputs, y)
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
        return value, outputs.detach()

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
                outputs = self.model(x)
                loss += float(self.task.loss(outputs, y, reduction="sum"))
                right += self.task.right(outputs, y)
                count += y.numel()
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

    def note(self, loss: float, outputs: Tensor, y: Tensor) -> None:
        """Takes in a step."""
        training = self.training
        done = training.steps - self.first
        self.loss += loss
        self.right += training.task.right(outputs, y)
        self.seen += y.numel()
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


@dataclass(frozen=True)
class _Listeners:
    """Who is told about a training."""

    watch: Watch
    each_epoch: Watch
    board: _Board


def _nobody(told: Mapping[str, Any]) -> None:
    pass


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
