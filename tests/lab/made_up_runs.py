"""Run folders as training leaves them, with made-up numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hesscale_lab.histories import METRICS
from hesscale_lab.runs import Run, open_run
from hesscale_lab.settings import Settings, folder_of

ADAM = Settings("digits", "Adam", lr=1e-3, beta1=0.0, beta2=0.999, seed=0, epochs=3)


def make_run(
    root: Path, settings: Settings, losses: Sequence[float], *, end: str | None = "finished", folder: Path | None = None
) -> Run:
    """A run with these losses on all splits, epoch by epoch; its accuracies are 1 − loss / 10, an epoch takes 2 s."""
    run = open_run(folder or folder_of(settings, root), settings.as_config())
    for epoch, loss in enumerate(losses):
        values = {name: loss if name.endswith("loss") else 1 - loss / 10 for name in METRICS}
        run.add({"kind": "epoch", "epoch": epoch, "steps": 10 * epoch, "seconds": 2.0 * epoch, **values})
    if end:
        run.add({"kind": "end", "reason": end, "epoch": len(losses) - 1, "step": 10 * len(losses)})
    return run


def make_seeds(root: Path, settings: Settings, curves: Sequence[Sequence[float]]) -> list[Run]:
    """One finished run per curve."""
    return [make_run(root, replace(settings, seed=seed), losses) for seed, losses in enumerate(curves)]


def cut_off(run: Run) -> None:
    """Leaves half a line, as a kill in the middle of writing does."""
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "epoch", "epoch": 9})[:15])
