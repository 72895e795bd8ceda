"""``hesscale train``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.progress import Progress, TaskID
from rich.table import Table

from ..optimizers import OPTIMIZERS, best_settings, optimizer_named, require_betas, require_fitting
from ..options import combinations
from ..plugins import read_plugin
from ..processes import Team, keep_freed_memory
from ..runs import DamagedRunError, OtherRunError, Run
from ..settings import MOST, Settings, folder_of
from ..tasks.archives import DataError
from ..tasks.table import TASKS, task_named
from ..training import Watch
from ..training import train as train_one
from ..wording import power
from .console import (
    Bound,
    Eps,
    Every,
    PluginFile,
    Rank,
    TrustRegion,
    check_numbers,
    clear_errors,
    not_below,
    progress_bar,
    show,
    stop,
)

_count = partial(not_below, most=MOST)


def train(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")] = "digits",
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")] = "AdaHesScale",
    lr: Annotated[float | None, typer.Option(help="Step size [default: as the authors selected, if they did].")] = None,
    beta1: Annotated[float | None, typer.Option(help="Of the average of gradients [default: likewise].")] = None,
    beta2: Annotated[float | None, typer.Option(help="Of the average of curvature [default: likewise].")] = None,
    seeds: Annotated[int | None, typer.Option(callback=_count(1), help="Repeat with seeds 0, 1, 2 …")] = None,
    seed: Annotated[int | None, typer.Option(callback=_count(0), help="Only this seed [default: 0].")] = None,
    epochs: Annotated[int | None, typer.Option(callback=_count(0), help="[default: as in the paper]")] = None,
    subset: Annotated[int | None, typer.Option(callback=_count(1), help="Training examples [default: all].")] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            help="Another value for a field of the task, such as activation=relu, width=0.5, variant=deepobs."
        ),
    ] = None,
    every: Every = None,
    eps: Eps = None,
    bound: Bound = None,
    trust_region: TrustRegion = None,
    rank: Rank = None,
    plugin: PluginFile = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the data as torchvision lays it out.")] = None,
    out: Annotated[Path, typer.Option(help="Folder below which the runs go.")] = Path("runs/train"),
    threads: Annotated[int, typer.Option(callback=not_below(1), help="Threads of torch.")] = 1,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard's files too.")] = False,
) -> None:
    """Train a network on one of the paper's tasks, with the settings the authors selected unless others are given.

    Task and optimizer may be your own: --plugin names the Python file. A run that was stopped or killed goes on where
    it was. Data that is not there is downloaded. Under torchrun the
    processes share each batch.

    \b
    Examples:
      hesscale train digits --optimizer AdaHesScale --seeds 3
      hesscale train mnist-mlp --optimizer Adam --epochs 20 --data DIR
      hesscale train mnist-mlp --every 10 --bound 1 --lr 1e-3
      hesscale train cifar10-3c3d --optimizer SGD --field activation=relu --subset 5000
      hesscale train spirals --plugin my_task.py --optimizer AdaHesScale --lr 1e-2
      torchrun --nproc-per-node 2 -m hesscale_lab.cli train cifar100-allcnnc
    """
    if seed is not None and seeds is not None:
        stop("choose one of --seed and --seeds", code=2)
    wanted = [seed or 0] if seeds is None else list(range(seeds))
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2}
    texts = {"every": every, "eps": eps, "bound": bound, "trust_region": trust_region, "rank": rank}
    try:
        for name, text in texts.items():
            if text is not None and "," in text:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is one value here, not {text!r}: hesscale sweep takes several")
        (options,) = combinations(texts)
        source = read_plugin(plugin) if plugin else None
        first = _settings(task, optimizer, numbers, field or (), epochs=epochs)
        first = replace(first, subset=subset, options=options, plugin=source)
        require_fitting(optimizer, options)
    except ValueError as error:
        stop(str(error), code=2)
    torch.set_num_threads(threads)
    keep_freed_memory()
    with clear_errors(out), _one_line(), _processes() as team:
        all_settings = [replace(first, seed=one, processes=team.count) for one in wanted]
        runs = _train_all(all_settings, out, team, data=data, tensorboard=tensorboard)
        if team.is_first:
            _show(all_settings, runs)


def _settings(
    task: str,
    optimizer: str,
    numbers: Mapping[str, float | None],
    fields: Sequence[str],
    *,
    epochs: int | None,
) -> Settings:
    """The settings that were given, with the authors' choice for the others; ValueError if they make no sense."""
    row = task_named(task)
    changed = row.parse_fields(fields)
    length = row.with_fields(changed).epochs if epochs is None else epochs
    beta1, beta2 = (0.9, 0.999) if optimizer_named(optimizer).betas else (0.0, 0.0)
    best = best_settings(task, optimizer)
    usual = best._asdict() if best else {"lr": None, "beta1": beta1, "beta2": beta2}
    chosen: dict[str, Any] = {name: usual[name] if value is None else value for name, value in numbers.items()}
    if chosen["lr"] is None:
        raise ValueError(f"nobody has tuned {optimizer} on {task}: give --lr (and --beta1, --beta2 unless 0.9, 0.999)")
    for name, value in chosen.items():
        check_numbers(name, [value], value)
    require_betas([optimizer], beta1=chosen["beta1"], beta2=chosen["beta2"])
    return Settings(task, optimizer, **chosen, seed=0, epochs=length, fields=changed)


@contextmanager
def _one_line() -> Iterator[None]:
    """Ends the command with one line if settings do not go together, such as a batch and a number of processes."""
    try:
        yield
    except (DamagedRunError, DataError, OtherRunError):
        raise
    except ValueError as error:
        stop(str(error), code=2)


@contextmanager
def _processes() -> Iterator[Team]:
    """The processes that torchrun started, if it did."""
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if together:
        dist.init_process_group("gloo")
    try:
        yield Team.current()
    finally:
        if together:
            dist.destroy_process_group()


def _train_all(
    all_settings: Sequence[Settings], out: Path, team: Team, *, data: Path | None, tensorboard: bool
) -> list[Run]:
    """Trains one after the other, with a bar on stderr; where there is no terminal, with a line for every epoch."""
    progress = progress_bar()
    shown = progress.console.is_terminal
    progress.disable |= not team.is_first
    with progress:
        bar = progress.add_task(all_settings[0].task, total=None)
        return [
            train_one(
                settings,
                folder_of(settings, out),
                data=data,
                watch=_watch(progress, bar, settings),
                each_epoch=None if shown else _line_for(settings),
                tensorboard=tensorboard,
            )
            for settings in all_settings
        ]


def _watch(progress: Progress, bar: TaskID, settings: Settings) -> Watch:
    def watch(now: Mapping[str, Any]) -> None:
        steps = now["steps_per_epoch"]
        progress.update(
            bar,
            total=settings.epochs * steps,
            completed=(now["epoch"] - 1) * steps + now["step"],
            description=f"seed {settings.seed}  epoch {now['epoch']}/{settings.epochs}  loss {now['loss']:.4f}  "
            f"accuracy {now['accuracy']:.1%}  {1000 * now['seconds_per_step']:.1f} ms/step",
        )

    return watch


def _line_for(settings: Settings) -> Watch:
    def line(record: Mapping[str, Any]) -> None:
        losses = "  ".join(f"{part} loss {record[f'{part}_loss']:.4f}" for part in ("train", "valid", "test"))
        typer.echo(
            f"seed {settings.seed}  epoch {record['epoch']}/{settings.epochs}  {losses}  "
            f"test accuracy {record['test_accuracy']:.2%}  {record['seconds']:.1f} s",
            err=True,
        )

    return line


def _show(all_settings: Sequence[Settings], runs: Sequence[Run]) -> None:
    first = all_settings[0]
    title = f"{first.task}, {first.label}: lr {power(first.lr)}, β₁ {first.beta1:g}, β₂ {first.beta2:g}"
    headings = ("seed", "epochs", "train loss", "valid loss", "test loss", "test accuracy", "s/epoch")
    rows = [_row(settings, run) for settings, run in zip(all_settings, runs, strict=True)]
    show(Table(title=title), headings, rows)
    typer.echo(f"wrote {runs[0].folder if len(runs) == 1 else runs[0].folder.parent}")


def _row(settings: Settings, run: Run) -> tuple[str, ...]:
    epochs, ends = ([record for record in run.records if record["kind"] == kind] for kind in ("epoch", "end"))
    reason = "" if ends[-1]["reason"] == "finished" else f", then {ends[-1]['reason']}"
    if not epochs:
        return str(settings.seed), f"0{reason}", *[""] * 5
    last = epochs[-1]
    return (
        str(settings.seed),
        f"{last['epoch']}{reason}",
        *(f"{last[f'{part}_loss']:.4f}" for part in ("train", "valid", "test")),
        f"{last['test_accuracy']:.2%}",
        f"{last['seconds'] / last['epoch']:.2f}" if last["epoch"] else "",
    )
