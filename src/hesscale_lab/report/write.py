"""From a collection of runs to files: every figure as PNG and SVG, and report.html with all of them inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..plots import learning_curves, sensitivity
from ..plots.learning_curves import Against
from .collect import Collection, Experiment, Study, environment_line
from .page import Picture, Section, page
from .paper import paper_curves
from .tables import final_table, percent, quality_tables, settings_table

PAGE = "report.html"

_STUDY_PICTURES = {
    "quality": "Distance of every estimate from the exact diagonal of the Hessian, in total and layer by layer.",
    "time": "Error of every estimate against the time it takes.",
    "cost": "Time of one update for every optimizer.",
}
"""What the figures of other studies show, by the beginning of their file names."""


def write(collection: Collection, out: Path) -> list[Path]:
    """The paths of the page and of the figures drawn for it; OSError if they cannot be written."""
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    sections = [_experiment_section(experiment, out, written) for experiment in collection.experiments]
    sections += [_study_section(study, number) for number, study in enumerate(collection.studies)]
    if collection.left_out:
        sections.append(Section("Left out", "left-out", collection.left_out))
    runs = sum(len(s.seeds) for experiment in collection.experiments for s in experiment.series)
    lead = f"{_count(runs, 'training')} and {_count(len(collection.studies), 'other run')}"
    path = out / PAGE
    path.write_text(page("hesscale: report", f"Made by hesscale report from {lead}.", sections), encoding="utf-8")
    return [path, *written]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _experiment_section(experiment: Experiment, out: Path, written: list[Path]) -> Section:
    paper = paper_curves(experiment.task)
    blocks: list[Any] = [final_table(experiment, paper)]
    for name, caption, draw, narrow in _figures(experiment):
        paths = _save(draw(), out / f"{experiment.name}-{name}")
        written += paths
        origin = {line: None for series in experiment.chosen.values() for line in series.environments}
        commands = [command for series in experiment.chosen.values() for command in series.commands]
        blocks.append(
            Picture(
                caption,
                _describe(experiment, caption),
                paths[0].read_bytes(),
                _png(narrow()),
                tuple(commands),
                tuple(origin),
            )
        )
    if experiment.is_search:
        blocks.append(settings_table(experiment))
    return Section(experiment.title, experiment.name, tuple(blocks))


def _figures(experiment: Experiment) -> Iterator[tuple[str, str, Callable[[], Figure], Callable[[], Figure]]]:
    """Name, caption, and how to draw it for a wide and for a narrow screen."""
    paper = paper_curves(experiment.task)
    band = "Bands: ± 2 standard errors over seeds." if any(len(s.seeds) > 1 for s in experiment.chosen.values()) else ""
    beside = " Dashes: the paper's curves at the same epochs." if set(paper) & set(experiment.chosen) else ""
    if beside and experiment.subset:
        beside += " The paper trained on all images, so an epoch there has more steps."
    rest = "Losses, and accuracies close to 100 %, are on logarithmic scales (of the error, there)."
    yield (
        "epochs",
        f"Learning curves by epoch. {band}{beside} {rest}",
        lambda: learning_curves.draw(experiment, paper),
        lambda: learning_curves.draw(experiment, paper, columns=1),
    )
    times = " No times of the paper's trainings were published: its axis of seconds was computed." if beside else ""
    yield (
        "seconds",
        f"The same by measured seconds of training, evaluations not counted. {band}{times}",
        lambda: learning_curves.draw(experiment, paper, against=Against.SECONDS),
        lambda: learning_curves.draw(experiment, paper, against=Against.SECONDS, columns=1),
    )
    if experiment.is_search:
        yield (
            "sensitivity",
            "Final test loss against the step size, for each pair of β₁ and β₂. Hollow marks: a run became not finite.",
            lambda: sensitivity.draw(experiment),
            lambda: sensitivity.draw(experiment, columns=1),
        )


def _describe(experiment: Experiment, caption: str) -> str:
    """In place of the picture, for who cannot see it."""
    finals = "; ".join(f"{n} {percent(s.values['test_accuracy'][-1])} %" for n, s in experiment.chosen.items())
    return f"{experiment.title}. {caption.split('. ')[0]}. Final test accuracy: {finals}."


def _study_section(study: Study, number: int) -> Section:
    config = study.run.config
    title = f"{study.run.folder.name}: {config['title']}" if "title" in config else study.run.folder.name
    blocks: list[Any] = []
    for path in study.pictures:
        begins = (text for start, text in _STUDY_PICTURES.items() if path.stem.startswith(start))
        caption = next(begins, f"{path.stem}.")
        commands, environments = (config.get("command", ""),), (environment_line(study.run),)
        blocks.append(Picture(caption, f"{title}. {caption}", path.read_bytes(), None, commands, environments))
    return Section(title, f"study-{number}", (*blocks, *quality_tables(study.run)))


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        # without a date, so that the same numbers make the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        figure.set_layout_engine("none")  # it is laid out now; doing it again would take seconds
    return paths


def _png(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
