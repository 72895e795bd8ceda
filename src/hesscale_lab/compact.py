"""Many finished trainings as two files of the folder they lie in: what they measured, and what they were.

    runs.csv     a row for every run and epoch: the run's folder, losses, accuracies, seconds
    runs.json    the environments, what all configurations share, how many rows there are, and for each run the rest of
                 its own configuration and how it ended

A run that was stored so is read as if its folder were still there; nothing about it is lost, and nothing is rounded.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import durable
from .histories import is_finished
from .locks import alone
from .runs import CONFIG, ENVIRONMENT, METRICS, DamagedRunError, Run

TABLE, INDEX = "runs.csv", "runs.json"
_NEAR = 4
"""Folders above a run that are the lab's: setting, optimizer, task, --out. A runs.json above may be of other use."""


@dataclass(frozen=True)
class StoredRun(Run):
    """A run whose folder is no more; it cannot be added to."""

    stored_config: Mapping[str, Any]
    stored_environment: Mapping[str, Any]
    stored_records: tuple[Mapping[str, Any], ...]

    @property
    def exists(self) -> bool:
        return True

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.stored_config)

    @property
    def environment(self) -> dict[str, Any]:
        return dict(self.stored_environment)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [dict(record) for record in self.stored_records]


@dataclass(frozen=True)
class Compacted:
    """How many runs a folder's files hold now, and which were left as they are, with the reason."""

    count: int
    left: tuple[str, ...]


def find_run(folder: Path) -> Run:
    """The run in this folder, or the one of this folder that was stored above it; else one that is still to come."""
    run = Run(folder)
    if run.exists:
        return run
    place = folder.absolute()
    for distance, above in enumerate(place.parents):
        names = (INDEX,) if distance < _NEAR else (INDEX, TABLE)
        is_there = all((above / name).exists() for name in names)
        if is_there and (found := _stored(above).get(place.relative_to(above).as_posix())):
            return found
    return run


def stored_runs(folder: Path) -> Iterator[StoredRun]:
    """All runs in the two files of this folder; DamagedRunError if they cannot be read."""
    yield from _stored(folder).values()


def compact(folder: Path) -> Compacted:
    """Stores all finished trainings below the folder in its two files, then removes what these hold.

    Other files in a run's folder, such as its weights, stay. Killed at any time, it loses nothing.
    """
    with alone(folder):
        together: dict[str, Run] = dict(_stored(folder)) if (folder / INDEX).exists() else {}
        left: dict[str, str] = {}
        for run in _trainings(folder):
            key = run.folder.relative_to(folder).as_posix()
            if reason := _why_not(run, together.get(key)):
                left[key] = f"{run.folder}: {reason}"
            else:
                together[key] = run
        if any(not isinstance(run, StoredRun) for run in together.values()):
            _write(folder, {key: together[key] for key in sorted(together)})
        _remove(folder, together.keys() - left.keys())  # also what a kill has left there
    return Compacted(len(together), tuple(left.values()))


def _trainings(folder: Path) -> Iterator[Run]:
    """What is a training, or may be one: of a damaged configuration nobody knows."""
    for path in sorted(folder.rglob(CONFIG)):
        run = Run(path.parent)
        try:
            fits = run.config.get("kind") == "train"
        except DamagedRunError:
            fits = True
        if fits and run.folder != folder:
            yield run


def _why_not(run: Run, before: Run | None) -> str | None:
    """The reason why a run stays a folder, if there is one."""
    try:
        config = run.config
        if not is_finished(run):
            return "it has not ended"
        if before is not None and (before.config, before.records) != (config, run.records):
            return f"{INDEX} holds another run of this name"
        if not _is_kept(run):
            return "its records are not those of a training"
    except (ValueError, LookupError, TypeError, OSError) as error:
        return " ".join(str(error).split())
    return None


def _is_kept(run: Run) -> bool:
    """Whether reading gives back exactly what is written."""
    again = _read("", *_as_text({"": run}))[""]
    return (again.config, again.environment, again.records) == (run.config, run.environment, run.records)


def _write(folder: Path, runs: Mapping[str, Run]) -> None:
    """The table first: rows of runs that the index does not name are not looked at."""
    index, table = _as_text(runs)
    durable.replace(folder / TABLE, table.encode())
    durable.replace(folder / INDEX, index.encode())


def _remove(folder: Path, runs: Iterable[str]) -> None:
    for key in runs:
        place = folder / key
        for name in (CONFIG, ENVIRONMENT, METRICS):  # without the first it is no run, should the others stay
            (place / name).unlink(missing_ok=True)
        with suppress(OSError):  # a folder that is not empty stays
            while place != folder:
                place.rmdir()
                place = place.parent


def _as_text(runs: Mapping[str, Run]) -> tuple[str, str]:
    """runs.json, a line for each run, and runs.csv."""
    configs = {key: run.config for key, run in runs.items()}
    first = next(iter(configs.values()))
    common = {name: value for name, value in first.items() if all(_has(c, name, value) for c in configs.values())}
    environments = list({json.dumps(run.environment): run.environment for run in runs.values()}.values())
    lines = []
    for key, run in runs.items():
        own = {name: value for name, value in configs[key].items() if name not in common}
        end = next(({**record} for record in run.records if record["kind"] == "end"), None)
        entry = {"config": own, "environment": environments.index(run.environment), "end": end}
        lines.append(f"  {_json(key)}: {_json(entry)}")
    rows = sum(record["kind"] == "epoch" for run in runs.values() for record in run.records)
    head = f'"environments": {_json(environments)},\n"common": {_json(common)},\n"rows": {rows},\n'
    return f"{{\n{head}" + '"runs": {\n' + ",\n".join(lines) + "\n}}\n", _table(runs)


def _has(config: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in config and _json(config[name]) == _json(value)  # 1 and 1.0 differ


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _table(runs: Mapping[str, Run]) -> str:
    rows = [
        {"run": key, **{name: value for name, value in record.items() if name != "kind"}}
        for key, run in runs.items()
        for record in run.records
        if record["kind"] == "epoch"
    ]
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["run"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _stored(folder: Path) -> dict[str, StoredRun]:
    index, table = folder / INDEX, folder / TABLE
    try:
        states = [(path.stat().st_mtime_ns, path.stat().st_size) for path in (index, table)]
        return _read_once(folder, *states[0], *states[1])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DamagedRunError(
            f"{index} and {table.name} cannot be read, so one is damaged ({reason}): get them again"
        ) from error


@lru_cache(maxsize=16)
def _read_once(folder: Path, *state: int) -> dict[str, StoredRun]:
    """Read again only when a file has changed: a sweep asks for each of its runs."""
    index = (folder / INDEX).read_text(encoding="utf-8")
    return _read(folder, index, (folder / TABLE).read_text(encoding="utf-8"))


def _read(folder: Path | str, index: str, table: str) -> dict[str, StoredRun]:
    content = json.loads(index)
    if not table.endswith("\n"):
        raise ValueError(f"{TABLE} ends within a row")
    measured: dict[str, list[Mapping[str, Any]]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        values = {name: _number(text) for name, text in row.items() if name != "run" and text != ""}
        measured.setdefault(row["run"], []).append({"kind": "epoch", **values})
    found = sum(len(measured.get(key, ())) for key in content["runs"])  # there are more after a kill, of runs to come
    if found != content.get("rows", found):  # which older files do not hold
        raise ValueError(f"{TABLE} has {found} rows of these runs, not {content['rows']}")
    return {
        key: StoredRun(
            Path(folder) / key,
            stored_config={**content["common"], **entry["config"]},
            stored_environment=content["environments"][entry["environment"]],
            stored_records=(*measured.get(key, ()), *_ends(entry["end"])),
        )
        for key, entry in content["runs"].items()
    }


def _ends(end: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    return () if end is None else (end,)


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)
