"""One training, read top to bottom: the loop, what it measures and keeps. A run can be killed at any time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Data, generator_for
from .batches import load as load_data
from .compact import find_run
from .files import alone
from .histories import is_finished
from .optimizers import backward, kernels_for, leaps_expected, make_optimizer, require_fitting, warm_up
from .plugins import load_plugin, named_in_errors
from .processes import Team
from .runs import (
    CHECKPOINT,
    WEIGHTS,
    DamagedRunError,
    Run,
    damaged_state,
    differences,
    load_state,
    open_run,
    replace_records,
    require_same,
    save_state,
)
from .settings import Settings, settings_of
from .tasks.archives import DataError
from .tasks.classifiers import seed_dropout
from .tasks.table import task_named
from .tasks.task import Task

Watch = Callable[[Mapping[str, Any]], None]
_BETWEEN_WATCHES = 0.25  # seconds
_FREE = ("command",)  # follows from the other settings, in any notation


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
    """The finished run in this folder: trained from the start, or continued from where it was stopped.

    ``data``: the folder with the examples; without it they are downloaded. ``watch`` gets the progress a few times a
    second, ``each_epoch`` the measurements after an epoch. The processes that torchrun started share each batch.
    If another training uses the folder, raises InUseError, or waits for its end.
    """
    load_plugin(settings.plugin)
    task = task_named(settings.task).with_fields(settings.fields)
    require_fitting(settings.optimizer, settings.options)
    settings = _with_text(settings, task.digest(data))
    team, run, config = Team.current(), find_run(folder), settings.as_config()
    if team.count != settings.processes:
        raise ValueError(f"the settings are for {settings.processes} processes, not {team.count}")
    if team.share(lambda: _has_ended(run, config)):
        with suppress(OSError):  # the folder may be read-only
            (folder / CHECKPOINT).unlink(missing_ok=True)  # of a run that was killed in its last moment
        return run
    with named_in_errors(settings.plugin), ExitStack() as stack:
        examples = load_data(task, seed=settings.seed, subset=settings.subset, folder=data)
        training = _Training(task, settings, examples, team)
        # the lock makes the folder, so it waits until data and settings are known to be good
        team.share(lambda: stack.enter_context(alone(folder, wait=wait)))
        if not team.share(lambda: _has_ended(run, config)):  # perhaps by now, in another process
            training.restore(team.share(lambda: _taken_up(run, config)), folder / CHECKPOINT)
            listeners = [each_epoch] if each_epoch else []
            if tensorboard and team.is_first:
                listeners.append(_tensorboard(folder, stack, after=training.epoch))
            with leaps_expected():
                _train(training, run, watch, listeners)
        if team.is_first:
            (folder / CHECKPOINT).unlink(missing_ok=True)
        team.wait()
    return run


def _with_text(settings: Settings, digest: str | None) -> Settings:
    """The settings with the digest of the text; DataError if they are for another text."""
    if settings.text and digest and settings.text != digest:
        raise DataError(
            f"the text here (digest {digest}) is not that of these settings ({settings.text}): get that one"
        )
    return replace(settings, text=settings.text or digest)


def _has_ended(run: Run, config: Mapping[str, Any]) -> bool:
    """Whether nothing is left to do. Changes nothing, because another process may use the folder."""
    if not run.exists:
        return False
    require_same(run, config, free=_FREE if config["text"] else (*_FREE, "text"))  # perhaps the text is gone by now
    try:
        return is_finished(run)
    except DamagedRunError:
        if (run.folder / CHECKPOINT).exists():  # it holds the measurements as well
            return False
        raise


def _taken_up(run: Run, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The checkpoint to continue from, if there is one; metrics.jsonl gets the lines that it had then."""
    path = run.folder / CHECKPOINT
    state = load_state(path)
    if state is not None and not _is_of(state, config):
        raise damaged_state(path)
    open_run(run.folder, config, free=_FREE)
    replace_records(run, state["records"] if state else [])
    return state


def _is_of(state: object, config: Mapping[str, Any]) -> bool:
    match state:
        case {"config": dict(saved), "records": _}:
            return not differences(config, saved, free=_FREE)
    return False


def _train(training: _Training, run: Run, watch: Watch | None, each_epoch: list[Watch]) -> None:
    epochs = training.settings.epochs
    try:
        if training.epoch < 0:
            training.epoch = 0
            _record(training, run, each_epoch)
        while training.epoch < epochs:
            training.run_epoch(watch)
            _record(training, run, each_epoch)
    except NotFinite:
        if training.team.is_first:
            run.add({"kind": "end", "reason": "not finite", "epoch": training.epoch, "step": training.steps})


def _record(training: _Training, run: Run, each_epoch: list[Watch]) -> None:
    """Measures, writes the line, then the checkpoint: a kill between the two repeats the epoch, and the line.

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
        save_state(run.folder / WEIGHTS, training.model.state_dict())
        run.add(record, {"kind": "end", "reason": "finished", "epoch": epoch, "step": steps})
    else:
        run.add(record)
        save_state(run.folder / CHECKPOINT, training.state())
    for listener in each_epoch:
        listener(record)


def trained_model(folder: Path) -> nn.Module:
    """The network of a finished run with its final weights, in evaluation mode; FileNotFoundError if it has none."""
    settings, path = settings_of(find_run(folder).config), folder / WEIGHTS
    load_plugin(settings.plugin)
    model = task_named(settings.task).with_fields(settings.fields).make(torch.Generator())
    weights = load_state(path)
    if weights is None:
        raise FileNotFoundError(f"{path} is not there: a run keeps its weights once it has finished")
    model.load_state_dict(weights)
    return model.eval()


class NotFinite(ArithmeticError):
    """A loss, a gradient, a curvature or a parameter is infinite or not a number."""


class _Training:
    """A network in training: its progress, one epoch, one measurement."""

    def __init__(self, task: Task, settings: Settings, data: Data, team: Team) -> None:
        self.task, self.settings, self.data, self.team = task, settings, data, team
        self.epoch, self.steps, self.seconds = -1, 0, 0.0
        self.records: list[dict[str, Any]] = []
        self.model = task.make(generator_for(settings.seed, "weights"))
        if task.fused:
            warm_up(settings.optimizer, settings.options)
        self.optimizer = make_optimizer(
            settings.optimizer,
            self.model,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=task.weight_decay,
            fused=task.fused,
            options=settings.options,
        )
        self.shared = team.wrap(self.model, self.optimizer, batch=task.batch)

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint, without generators: each epoch makes its own from the seed."""
        return {
            "config": self.settings.as_config(),
            "records": self.records,
            "seconds": self.seconds,
            "steps": self.steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any] | None, path: Path) -> None:
        """Goes back to the state in this file, if there is one."""
        if state is None:
            return
        try:
            self.records, self.steps, self.seconds = state["records"], state["steps"], state["seconds"]
            self.epoch = len(self.records) - 1
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise damaged_state(path) from error

    def run_epoch(self, watch: Watch | None) -> None:
        """Trains once on all training examples; ``watch`` gets averages over the epoch so far."""
        self.epoch += 1
        seed, first, began = self.settings.seed, self.steps, self.seconds
        seed_dropout(self.model, generator_for(seed, "dropout", self.epoch, self.team.rank))
        probes = generator_for(seed, "curvature", self.epoch)
        self.model.train()
        total = right = seen = 0.0
        told, start = -math.inf, time.perf_counter()
        for batch in self.data.epoch(self.epoch):
            x, y = (self.team.part(tensor) for tensor in batch)
            loss, outputs = self._step(x, y, probes)
            now = time.perf_counter()
            self.seconds = began + now - start
            done = self.steps - first
            total, right, seen = total + loss, right + self.task.right(outputs, y), seen + y.numel()
            if watch and (now - told >= _BETWEEN_WATCHES or done == self.data.steps):
                told = now
                watch(
                    {
                        "epoch": self.epoch,
                        "epochs": self.settings.epochs,
                        "step": done,
                        "steps_per_epoch": self.data.steps,
                        "loss": total / done,
                        "accuracy": right / seen,
                        "seconds_per_step": (self.seconds - began) / done,
                    }
                )

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
        """Mean losses with the L2 term, and accuracies, on the three sets."""
        self.model.eval()
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        penalty = 0.5 * self.task.weight_decay * sum(float(p.double().square().sum()) for p in weights)
        measured: dict[str, float] = {}
        for name, pieces in self.data.measured(self.epoch).items():
            loss = right = count = 0.0
            for x, y in pieces:
                outputs = self.model(x)
                loss += float(self.task.loss(outputs, y, reduction="sum"))
                right += self.task.right(outputs, y)
                count += y.numel()
            measured |= {f"{name}_loss": loss / count + penalty, f"{name}_accuracy": right / count}
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            measured["train_loss"] = math.nan  # a ReLU may hide a unit at minus infinity
        return measured


def _tensorboard(folder: Path, stack: ExitStack, *, after: int) -> Watch:
    """A listener that writes TensorBoard's files beside the run."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(folder, purge_step=after + 1)
    stack.callback(writer.close)

    def add(record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            part, _, kind = name.partition("_")
            if kind:
                writer.add_scalar(f"{kind}/{part}", value, record["epoch"])

    return add
