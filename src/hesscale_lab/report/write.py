"""From a collection of runs to files: every figure as PNG and SVG, the numbers as CSV, and report.html with it all."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..figures import Plot, as_png, save
from ..histories import METRICS
from ..studies.table import STUDIES, WITH_OPTIONS
from ..wording import Table, counted, csv_text, one_line, percent
from . import learning_curves, sensitivity
from .collect import Collection, Experiment, Series
from .learning_curves import Against
from .page import Picture, Section, page
from .paper import paper_curves
from .per_second import baseline_of, comparisons, per_second_table
from .reading import StudyRun
from .tables import final_table, settings_table

PAGE = "report.html"
CsvRow = Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """The files written, and what could not be drawn."""

    paths: tuple[Path, ...]
    left_out: tuple[str, ...]


def write(collection: Collection, out: Path) -> Written:
    """Draws and writes everything; OSError if it cannot be written. A part that cannot be drawn is left out."""
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    sections, left_out = [], []
    names = _file_names([study.folder for study in collection.studies])
    parts: tuple[Experiment | StudyRun, ...] = (*collection.experiments, *collection.studies)
    for number, part in enumerate(parts):
        try:
            if isinstance(part, StudyRun):
                sections.append(_study_section(part, number, out / names[part.folder], written))
            else:
                sections.append(_experiment_section(part, out, written))
        except OSError:
            raise
        except Exception as error:  # matplotlib may refuse numbers that nobody has seen yet
            left_out.append(f"{part.title}: cannot be drawn ({one_line(error)})")
    everything = (*collection.left_out, *left_out)
    if everything:
        sections.append(Section("Left out", "left-out", everything))
    path = out / PAGE
    text = page("hesscale: report", f"Made by hesscale report from {_lead(collection)}.", sections)
    path.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return Written((path, *_write_numbers(collection, out), *written), tuple(left_out))


def _lead(collection: Collection) -> str:
    runs = sum(len(s.seeds) for experiment in collection.experiments for s in experiment.series)
    counts = {"training": runs, "other run" if runs else "run": len(collection.studies)}
    return " and ".join(counted(count, noun) for noun, count in counts.items() if count)


def _experiment_section(experiment: Experiment, out: Path, written: list[Path]) -> Section:
    chosen = experiment.chosen.values()
    environments = tuple(dict.fromkeys(line for series in chosen for line in series.environments))
    commands = tuple(command for series in chosen for command in series.commands)
    blocks: list[Picture | Table | str] = [final_table(experiment, paper_curves(experiment.task))]
    if (per_second := per_second_table(experiment)) is not None:
        blocks.append(per_second)
    for plot in _plots(experiment):
        paths = save(plot.figure, out / f"{experiment.name}-{plot.name}")
        written += paths
        narrow = as_png(plot.narrow) if plot.narrow else None
        alt = _description(experiment, plot.caption)
        blocks.append(Picture(plot.caption, alt, paths[0].read_bytes(), narrow, commands, environments))
    if experiment.is_search:
        blocks.append(settings_table(experiment))
    return Section(experiment.title, experiment.name, tuple(blocks))


def _plots(experiment: Experiment) -> Iterator[Plot]:
    paper = paper_curves(experiment.task)
    band = "Bands: ± 2 standard errors over seeds." if any(len(s.seeds) > 1 for s in experiment.chosen.values()) else ""
    beside = "Dashes: the paper's curves at the same epochs." if set(paper) & set(experiment.chosen) else ""
    times = "No times of the paper's trainings were published: its axis of seconds was computed." if beside else ""
    if beside and experiment.subset:
        beside += " The paper trained on all images, so an epoch there has more steps."
    scales = (
        "Losses, if all are above 0, and accuracies close to 100 %, are on logarithmic scales (of the error, there)."
    )
    captions = {
        Against.EPOCHS: ("Learning curves by epoch.", band, beside, scales),
        Against.SECONDS: ("The same by measured seconds of training, evaluations not counted.", band, times),
    }
    for against, sentences in captions.items():
        wide, narrow = (learning_curves.draw(experiment, paper, against=against, columns=n) for n in (3, 1))
        yield Plot(against, " ".join(filter(None, sentences)), wide, narrow)
    if experiment.is_search and any(series.has_ended for series in experiment.series):
        yield Plot(
            "sensitivity",
            "Final test loss against lr, for each pair of β₁ and β₂. Hollow marks: a run became not finite.",
            sensitivity.draw(experiment),
            sensitivity.draw(experiment, columns=1),
        )


def _description(experiment: Experiment, caption: str) -> str:
    """The text for readers who cannot see the picture."""
    finals = "; ".join(f"{n} {percent(s.values['test_accuracy'][-1])} %" for n, s in experiment.chosen.items())
    return f"{experiment.title}. {caption.split('. ')[0]}. Final test accuracy: {finals}."


def _file_names(folders: list[Path]) -> dict[Path, str]:
    """How the file names of each study's figures begin: with the path below the folder that all studies are in."""
    paths = {folder: folder.resolve() for folder in folders}
    root = Path(os.path.commonpath([path.parent for path in paths.values()])) if paths else Path()
    return {folder: "-".join(path.relative_to(root).parts) for folder, path in paths.items()}


def _study_section(run: StudyRun, number: int, stem: Path, written: list[Path]) -> Section:
    commands, environments = (str(run.config.get("command", "")),), (run.environment,)
    pictures = []
    for plot in run.study.figures(run.config, run.records):
        (path,) = save(plot.figure, stem.with_name(f"{stem.name}-{plot.name}"), ("png",))
        written.append(path)
        alt = f"{run.title}. {plot.caption}"
        pictures.append(Picture(plot.caption, alt, path.read_bytes(), None, commands, environments))
    return Section(run.title, f"study-{number}", (*run.tables, *pictures))


def _write_numbers(collection: Collection, out: Path) -> list[Path]:
    """Writes the files that have rows: report.csv, seconds.csv, and one for each study of which there may be many runs.

    Another study has one run, with its file in the run's folder.
    """
    tables: dict[str, list[CsvRow]] = {
        "report": [row for experiment in collection.experiments for row in _training_rows(experiment)],
        "seconds": [row for experiment in collection.experiments for row in _per_second_rows(experiment)],
    }
    for name in WITH_OPTIONS:
        runs = (run for run in collection.studies if run.study is STUDIES[name])
        tables[name] = [{"folder": str(run.folder), **row} for run in runs for row in run.study.rows(run.records)]
    paths = []
    for name, rows in tables.items():
        path = out / f"{name}.csv"
        if rows:
            path.write_text(csv_text(rows), encoding="utf-8", errors="backslashreplace", newline="")
            paths.append(path)
        else:
            path.unlink(missing_ok=True)  # of an earlier report in the same folder
    return paths


def _training_rows(experiment: Experiment) -> Iterator[CsvRow]:
    """Means over seeds and their standard errors (_se), for every setting and epoch."""
    for series in experiment.series:
        common = {"chosen": int(experiment.chosen[series.label] is series), **_setting(series)}
        common |= {"not_finite": series.not_finite, "seeds": len(series.seeds)}
        for epoch in range(series.epochs + 1):
            row = {**_conditions(experiment), **common, "epoch": epoch, "seconds": series.seconds[epoch]}
            for name in METRICS:
                row[name], row[f"{name}_se"] = series.values[name][epoch]
            yield row


def _per_second_rows(experiment: Experiment) -> Iterator[CsvRow]:
    """Every optimizer beside Adam, by measured seconds."""
    for one in comparisons(experiment):
        row = {**_conditions(experiment), "against": baseline_of(experiment)}
        row |= {**_setting(one.series), "seeds": one.seeds, "reached": one.reached}
        for name in ("seconds", "time", "area"):
            row[name], row[f"{name}_se"] = getattr(one, name) or (math.nan, math.nan)
        yield {**row, "time_verdict": one.time_verdict, "area_verdict": one.area_verdict}


def _setting(series: Series) -> CsvRow:
    return {name: getattr(series, name) for name in ("optimizer", "options", "lr", "beta1", "beta2")}


def _conditions(experiment: Experiment) -> CsvRow:
    return {
        "place": experiment.folder,
        "task": experiment.task,
        "subset": experiment.subset,
        "fields": experiment.fields,
        "of_epochs": experiment.epochs,
    }
