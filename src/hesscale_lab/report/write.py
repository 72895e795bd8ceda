"""From a collection of runs to files: every figure as PNG and SVG, the numbers as CSV, and report.html with it all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..plots import learning_curves, sensitivity
from ..plots.drawn import Drawn, as_png, save
from ..plots.learning_curves import Against
from ..wording import counted
from .collect import Collection, Experiment
from .estimate import percent
from .numbers import write_numbers
from .page import Picture, Section, page
from .paper import paper_curves
from .per_second import per_second_table
from .reading import Study
from .table import Table
from .tables import final_table, settings_table

PAGE = "report.html"


@dataclass(frozen=True)
class Written:
    """The paths of the page, of the numbers and of the figures drawn, and what had to be left out after all."""

    paths: tuple[Path, ...]
    left_out: tuple[str, ...]


def write(collection: Collection, out: Path) -> Written:
    """Draws and writes everything; OSError if it cannot be written.

    Runs were checked when they were collected. Should one not be drawable nevertheless, it costs its own section only.
    """
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    sections, left_out = [], []
    parts: tuple[Experiment | Study, ...] = (*collection.experiments, *collection.studies)
    names = _file_names(collection.studies)
    for number, part in enumerate(parts):
        try:
            if isinstance(part, Study):
                sections.append(_study_section(part, number, out / names[part.folder], written))
            else:
                sections.append(_experiment_section(part, out, written))
        except OSError:
            raise
        except Exception as error:  # whatever matplotlib may have against numbers that nobody has seen yet
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            left_out.append(f"{part.title}: cannot be drawn ({reason})")
    everything = (*collection.left_out, *left_out)
    if everything:
        sections.append(Section("Left out", "left-out", everything))
    path = out / PAGE
    text = page("hesscale: report", f"Made by hesscale report from {_lead(collection)}.", sections)
    path.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return Written((path, *write_numbers(collection, out), *written), tuple(left_out))


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
    for drawn in _figures(experiment):
        paths = save(drawn.figure, out / f"{experiment.name}-{drawn.name}")
        written += paths
        narrow = as_png(drawn.narrow) if drawn.narrow else None
        alt = _describe(experiment, drawn.caption)
        blocks.append(Picture(drawn.caption, alt, paths[0].read_bytes(), narrow, commands, environments))
    if experiment.is_search:
        blocks.append(settings_table(experiment))
    return Section(experiment.title, experiment.name, tuple(blocks))


def _figures(experiment: Experiment) -> Iterator[Drawn]:
    paper = paper_curves(experiment.task)
    band = "Bands: ± 2 standard errors over seeds." if any(len(s.seeds) > 1 for s in experiment.chosen.values()) else ""
    beside = "Dashes: the paper's curves at the same epochs." if set(paper) & set(experiment.chosen) else ""
    if beside and experiment.subset:
        beside += " The paper trained on all images, so an epoch there has more steps."
    scales = (
        "Losses, if all are above 0, and accuracies close to 100 %, are on logarithmic scales (of the error, there)."
    )
    yield Drawn(
        "epochs",
        _joined("Learning curves by epoch.", band, beside, scales),
        learning_curves.draw(experiment, paper),
        learning_curves.draw(experiment, paper, columns=1),
    )
    times = "No times of the paper's trainings were published: its axis of seconds was computed." if beside else ""
    yield Drawn(
        "seconds",
        _joined("The same by measured seconds of training, evaluations not counted.", band, times),
        learning_curves.draw(experiment, paper, against=Against.SECONDS),
        learning_curves.draw(experiment, paper, against=Against.SECONDS, columns=1),
    )
    if experiment.is_search and any(series.has_ended for series in experiment.series):
        yield Drawn(
            "sensitivity",
            "Final test loss against lr, for each pair of β₁ and β₂. Hollow marks: a run became not finite.",
            sensitivity.draw(experiment),
            sensitivity.draw(experiment, columns=1),
        )


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _describe(experiment: Experiment, caption: str) -> str:
    """In place of the picture, for who cannot see it."""
    finals = "; ".join(f"{n} {percent(s.values['test_accuracy'][-1])} %" for n, s in experiment.chosen.items())
    return f"{experiment.title}. {caption.split('. ')[0]}. Final test accuracy: {finals}."


def _file_names(studies: Sequence[Study]) -> dict[Path, str]:
    """What the figures of each study begin with: its folder below the one that all are in, such as quality-paper."""
    places = {study.folder: study.folder.resolve() for study in studies}
    shared = Path(os.path.commonpath([place.parent for place in places.values()])) if places else Path()
    return {folder: "-".join(place.relative_to(shared).parts) for folder, place in places.items()}


def _study_section(study: Study, number: int, stem: Path, written: list[Path]) -> Section:
    commands, environments = (str(study.config.get("command", "")),), (study.environment,)
    pictures = [(f"{name}.", content) for name, content in study.pictures]
    if study.kind and study.records:
        for drawn in study.kind.figures(study.config, study.records):
            paths = save(drawn.figure, stem.with_name(f"{stem.name}-{drawn.name}"), ("png",))
            written += paths
            pictures.append((drawn.caption, paths[0].read_bytes()))
    blocks = [
        Picture(caption, f"{study.title}. {caption}", content, None, commands, environments)
        for caption, content in pictures
    ]
    return Section(study.title, f"study-{number}", (*study.tables, *blocks))
