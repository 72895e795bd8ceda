"""``hesscale sweep``."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ..compact import find_run
from ..histories import read_history
from ..optimizers import PAPERS, optimizer_named, require_betas
from ..options import Options, combinations
from ..plugins import named_in_errors, read_plugin
from ..settings import MOST, Settings, folder_of
from ..sweeps import Sweep, grid
from ..sweeps import sweep as search
from ..tasks.table import task_named
from ..wording import estimate, percent, plain, power
from ..workers import Progress, Status, Watch, WorkersError, cluster, progress_of, run_all
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
    show,
    stop,
)

_count = not_below(1, most=MOST)


def sweep(
    task: Annotated[str, typer.Argument(help="What to train, such as digits or mnist-mlp.")],
    optimizers: Annotated[
        str | None, typer.Option(help="Names with commas between them [default: the paper's].")
    ] = None,
    lrs: Annotated[str | None, typer.Option(help="Step sizes to try [default: the paper's, 1e-5 … 1e-1].")] = None,
    beta1s: Annotated[str | None, typer.Option(help="β₁ to try [default: the paper's, 0,0.9].")] = None,
    beta2s: Annotated[str | None, typer.Option(help="β₂ to try [default: the paper's, 0.99,0.999,0.9999].")] = None,
    epochs: Annotated[int | None, typer.Option(callback=_count, help="[default: the task's.]")] = None,
    subset: Annotated[int | None, typer.Option(callback=_count, help="Train on so many examples only.")] = None,
    field: Annotated[
        list[str] | None, typer.Option(help="Another value for a field of the task, such as activation=relu.")
    ] = None,
    every: Every = None,
    eps: Eps = None,
    bound: Bound = None,
    trust_region: TrustRegion = None,
    rank: Rank = None,
    seeds: Annotated[int, typer.Option(callback=_count, help="Repeats of the chosen settings.")] = 3,
    workers: Annotated[
        int | None, typer.Option(callback=not_below(1), help="Runs at a time [default: as cores allow].")
    ] = None,
    threads: Annotated[int, typer.Option(callback=not_below(1), help="Threads of torch, and cores, of a run.")] = 1,
    address: Annotated[str | None, typer.Option(help="A Ray cluster, such as HOST:6379 or auto.")] = None,
    plugin: PluginFile = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the data; without it, it is downloaded.")] = None,
    out: Annotated[Path, typer.Option(help="Folder below which the runs go.")] = Path("runs/train"),
) -> None:
    """Search for the settings of optimizers as the paper did, and repeat the best with several seeds.

    Chosen is the smallest area under the validation loss, for each optimizer and each value of its options (--every
    1,10); an option goes to the optimizers that take it. Runs go in parallel on Ray, one core each unless
    --threads asks for more. A finished run is never computed again, be it of a sweep or of hesscale train: after an
    interrupt, the same command goes on.

    \b
    Examples:
      hesscale sweep digits --optimizers Adam,AdaHesScale --epochs 5
      hesscale sweep mnist-mlp --lrs 1e-5,1e-4,1e-3 --beta2s 0.9999 --epochs 10 --data DIR
      hesscale sweep mnist-mlp --optimizers Adam,AdaHesScale --every 1,10,20 --lrs 3e-5,1e-4,3e-4
      hesscale sweep cifar10-3c3d --address HOST:6379 --data DIR --out SHARED
    """
    texts = {"every": every, "eps": eps, "bound": bound, "trust_region": trust_region, "rank": rank}
    try:
        source = read_plugin(plugin) if plugin else None
        fields = task_named(task).parse_fields(field or ())
        row = task_named(task).with_fields(fields)
        names = _names(optimizers)
        options = combinations(texts)
        _refuse_idle(names, options)
        numbers = {name: _numbers(name, text) for name, text in (("lrs", lrs), ("beta1s", beta1s), ("beta2s", beta2s))}
        require_betas(names, **{name: max(numbers[name] or (0.0,)) for name in ("beta1s", "beta2s")})
    except ValueError as error:
        stop(str(error), code=2)
    same: dict[str, Any] = {"epochs": epochs or row.epochs, "subset": subset, "fields": fields, "options": options}
    with clear_errors(out):
        same |= {"plugin": source, "text": row.digest(data), **numbers}
        settings = [one for name in names for one in grid(task, name, **same)]
        out.mkdir(parents=True, exist_ok=True)
        cores = {"address": address, "workers": workers, "threads": threads}
        result = _sweep(settings, out, seeds=seeds, cores=cores, data=data)
    _show(result, task, out)
    if result.failed:
        stop(f"{len(result.failed)} of the runs failed; the same command tries them again", code=1)


def _names(text: str | None) -> list[str]:
    names = list(PAPERS) if text is None else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        optimizer_named(name)
    if not names:
        raise ValueError("--optimizers names none")
    return list(dict.fromkeys(names))


def _refuse_idle(names: Sequence[str], options: Sequence[Options]) -> None:
    """ValueError if an option fits none of the optimizers."""
    for option in dict.fromkeys(option for one in options for option, _ in one):
        if not any(option in optimizer_named(name).takes for name in names):
            raise ValueError(f"{option} does not go with {' or '.join(names)}")


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """The numbers of an option; ValueError if one is no number or out of range."""
    if text is None:
        return None
    try:
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--{option} takes numbers with commas between them, not {text!r}") from None
    check_numbers(option, numbers, text)
    return numbers


def _sweep(
    settings: Sequence[Settings], out: Path, *, seeds: int, cores: Mapping[str, Any], data: Path | None
) -> Sweep:
    run = partial(run_all, root=out, data=data, **cores)
    if all(progress_of(one, folder_of(one, out)).has_ended for one in settings):
        session: AbstractContextManager[object] = nullcontext()  # Ray is not needed
    else:
        session = cluster(**cores)
        with named_in_errors(settings[0].plugin):  # downloads the data, or says that it is missing
            task_named(settings[0].task).with_fields(settings[0].fields).load(data)
    try:
        with _live_table() as watch, session:
            return search(settings, seeds=seeds, run=partial(run, watch=watch))
    except WorkersError as error:
        stop(str(error), code=1)


@contextmanager
def _live_table() -> Iterator[Watch]:
    """A live table on stderr; where there is no terminal, a line for every run that ends."""
    console = Console(stderr=True)
    before: dict[Path, Status] = {}

    def watch(board: Sequence[Progress]) -> None:
        for progress in board:
            changed = before.get(progress.folder, progress.status) is not progress.status
            before[progress.folder] = progress.status
            if changed and progress.status is Status.FAILED:
                console.print(f"hesscale: {progress.folder}: {progress.error}", soft_wrap=True, highlight=False)
            elif changed and progress.has_ended and not console.is_terminal:
                console.print(f"{progress.status}: {progress.folder}", soft_wrap=True, highlight=False)
        live.update(_picture(board))

    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield watch


def _picture(board: Sequence[Progress]) -> Group:
    counts = Table(title=f"{sum(p.has_ended for p in board)} of {len(board)} runs", title_justify="left")
    counts.add_column("optimizer")
    for status in Status:
        counts.add_column(status, justify="right")
    for name in dict.fromkeys(p.settings.label for p in board):
        tally = Counter(p.status for p in board if p.settings.label == name)
        counts.add_row(name, *(str(tally[status] or "") for status in Status))
    running = Table(box=None)
    for heading in ("running", "epoch", "validation loss"):
        running.add_column(heading, justify="left" if heading == "running" else "right")
    for p in board:
        if p.status is Status.RUNNING:
            loss = "" if p.valid_loss is None else f"{p.valid_loss:.4f}"
            running.add_row(_describe(p.settings), f"{p.epoch or 0} of {p.settings.epochs}", loss)
    return Group(counts, running)


def _describe(settings: Settings) -> str:
    betas = f" β {settings.beta1:g}, {settings.beta2:g}" if settings.beta1 or settings.beta2 else ""
    return f"{settings.label} lr {power(settings.lr)}{betas} seed {settings.seed}"


def _show(result: Sweep, task: str, out: Path) -> None:
    rows, counts = [], set()
    for name, best in result.chosen.items():
        runs = [find_run(p.folder) for p in result.repeated if p.settings.label == name and p.has_ended]
        histories = [history for history in map(read_history, runs) if history is not None]
        if not histories:
            continue
        counts.add(len(histories))
        losses, accuracies = ([h.values[f"test_{kind}"][-1] for h in histories] for kind in ("loss", "accuracy"))
        betas = f"{best.beta1:g}, {best.beta2:g}" if best.beta1 or best.beta2 else ""
        mean_area = f"{estimate([h.area for h in histories]).mean:.3f}"
        rows.append((name, power(best.lr), betas, mean_area, plain(estimate(losses)), percent(estimate(accuracies))))
    if rows:
        seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
        table = Table(
            title=f"{task}: chosen by the smallest area under the validation loss",
            caption=f"after the last epoch: mean ± standard error over seeds ({seeds})",
        )
        show(table, ("optimizer", "lr", "β₁, β₂", "area", "test loss", "accuracy %"), rows)
    typer.echo(f"runs are in {out / task}; `hesscale report {shlex.quote(str(out / task))}` draws them")
