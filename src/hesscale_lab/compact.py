"""Many finished trainings as two files of the folder above them, which read as the run folders did.

runs.csv     a row for every run and epoch: the run's folder, losses, accuracies, seconds
runs.json    the environments, what all configurations share, the number of rows, and for each run the rest of its
             configuration and how it ended
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import files
from .files import alone
from .histories import is_finished
from .runs import CONFIG, ENVIRONMENT, MEASUREMENTS, DamagedRunError, Run
from .wording import csv_text, one_line

TABLE, INDEX = "runs.csv", "runs.json"


@dataclass(frozen=True)
class StoredRun(Run):
    """A run that is in the two files; it cannot be added to."""

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


def find_run(folder: Path) -> Run:
    """The run in this folder, or the stored run of this folder; otherwise a run that is not begun."""
    run = Run(folder)
    if not run.exists:
        absolute = folder.absolute()
        for above in absolute.parents:
            if (above / INDEX).exists() and (above / TABLE).exists():  # another program may have a runs.json
                key = absolute.relative_to(above).as_posix()
                if stored := stored_runs(above).get(key):
                    return stored
    return run


def stored_runs(folder: Path) -> dict[str, StoredRun]:
    """The runs in the two files of this folder, by their folder; DamagedRunError if the files cannot be read."""
    try:
        states = [(path.stat().st_mtime_ns, path.stat().st_size) for path in (folder / INDEX, folder / TABLE)]
        return _read_once(folder, *states)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedRunError(
            f"{folder / INDEX} and {TABLE} cannot be read, so one is damaged ({one_line(error)}): get them again"
        ) from error


def compact(folder: Path) -> tuple[int, list[str]]:
    """Stores the finished trainings below a folder; how many are stored now, and why others were left as they are."""
    with alone(folder):
        runs: dict[str, Run] = {**stored_runs(folder)} if (folder / INDEX).exists() else {}
        left: dict[str, str] = {}
        for path in sorted(folder.rglob(CONFIG)):
            run, key = Run(path.parent), path.parent.relative_to(folder).as_posix()
            if run.folder == folder:
                continue
            try:
                if run.config.get("kind") != "train":
                    continue
                if reason := _why_not(run, runs.get(key)):
                    raise ValueError(reason)
                runs[key] = run
            except (ValueError, LookupError, TypeError, OSError) as error:
                left[key] = f"{run.folder}: {' '.join(str(error).split())}"
        if any(not isinstance(run, StoredRun) for run in runs.values()):
            index, table = _as_text({key: runs[key] for key in sorted(runs)})
            files.replace(folder / TABLE, table.encode())  # first: rows without an entry in the index do not count
            files.replace(folder / INDEX, index.encode())
        _remove((folder / key for key in runs.keys() - left.keys()), folder)  # and what a kill has left of others
    return len(runs), [*left.values()]


def _why_not(run: Run, stored: Run | None) -> str | None:
    """The reason why a run stays a folder, if there is one."""
    if not is_finished(run):
        return "it has not ended"
    if stored is not None and (stored.config, stored.records) != (run.config, run.records):
        return f"{INDEX} holds another run of this name"
    again = _read(Path(), *_as_text({"": run}))[""]
    if (again.config, again.environment, again.records) != (run.config, run.environment, run.records):
        return "its records are not those of a training"
    return None


def _remove(folders: Iterable[Path], root: Path) -> None:
    for folder in folders:
        for name in (CONFIG, ENVIRONMENT, MEASUREMENTS):  # without config.json it is no run, should the others stay
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # stops at a folder that is not empty
            while folder != root:
                folder.rmdir()
                folder = folder.parent


def _as_text(runs: Mapping[str, Run]) -> tuple[str, str]:
    """The content of runs.json, with a line for each run, and of runs.csv."""
    configs = {key: run.config for key, run in runs.items()}
    first = next(iter(configs.values()))
    common = {name: value for name, value in first.items() if all(_has(c, name, value) for c in configs.values())}
    environments = list({_json(run.environment): run.environment for run in runs.values()}.values())
    lines, rows = [], []
    for key, run in runs.items():
        config = {name: value for name, value in configs[key].items() if name not in common}
        ends = [record for record in run.records if record["kind"] == "end"]
        entry = {"config": config, "environment": environments.index(run.environment), "end": ends[0] if ends else None}
        lines.append(f"  {_json(key)}: {_json(entry)}")
        epochs = (record for record in run.records if record["kind"] == "epoch")
        rows += [{"run": key, **{name: value for name, value in r.items() if name != "kind"}} for r in epochs]
    head = f'"environments": {_json(environments)},\n"common": {_json(common)},\n"rows": {len(rows)},\n'
    return f"{{\n{head}" + '"runs": {\n' + ",\n".join(lines) + "\n}}\n", csv_text(rows)


def _has(config: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in config and _json(config[name]) == _json(value)  # 1 and 1.0 differ


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=16)
def _read_once(folder: Path, *states: tuple[int, int]) -> dict[str, StoredRun]:
    """Reads the files again only when they have changed: a sweep asks for each of its runs."""
    index = (folder / INDEX).read_text(encoding="utf-8")
    return _read(folder, index, (folder / TABLE).read_text(encoding="utf-8"))


def _read(folder: Path, index: str, table: str) -> dict[str, StoredRun]:
    content = json.loads(index)
    if not table.endswith("\n"):
        raise ValueError(f"{TABLE} ends within a row")
    epochs: dict[str, list[Mapping[str, Any]]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        values = {name: _number(text) for name, text in row.items() if name != "run" and text != ""}
        epochs.setdefault(row["run"], []).append({"kind": "epoch", **values})
    count = sum(len(epochs.get(key, ())) for key in content["runs"])  # a killed compact leaves rows of other runs
    if count != content["rows"]:
        raise ValueError(f"{TABLE} has {count} rows of these runs, not {content['rows']}")
    return {
        key: StoredRun(
            folder / key,
            stored_config={**content["common"], **entry["config"]},
            stored_environment=content["environments"][entry["environment"]],
            stored_records=(*epochs.get(key, ()), *_ends(entry["end"])),
        )
        for key, entry in content["runs"].items()
    }


def _ends(end: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    return () if end is None else (end,)


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)
