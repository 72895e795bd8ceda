"""How returns depend on the step size: A2C and PPO with Adam, Adam in a trust region, AdaHesScale and AdaHesScaleGN.

All optimizers get the same networks, step sizes and seeds. Returns of CartPole, Acrobot and Pendulum are put on one
scale: the gain is 0 for actions at random, 1 for a problem that counts as solved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hesscale
from hesscale.applications.step_size import TrustRegion

from ..reinforcement.environments import ENVIRONMENTS
from ..reinforcement.training import ALGORITHMS, WINDOWS, Method, Runs, curves
from .reading import Record, is_size

STEPS = 40 * 1024
RATES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
SEEDS = 10
TOGETHER = 5
"""Seeds that are trained at once."""
DELTA = 1e-4
"""Of the trust region, everywhere: the default of the code that came with the paper's follow-up."""
COLLAPSE = 0.5
"""A run has collapsed if it ends with less than this part of the best gain that it ever had."""


def _adam(params: Any, lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=lr, fused=True)


METHODS: Mapping[str, Method] = {
    "Adam": Method(_adam),
    "AdaHesScale": Method(lambda params, lr: hesscale.AdaHesScale(params, lr=lr), "hesscale"),
    "AdaHesScaleGN": Method(lambda params, lr: hesscale.AdaHesScaleGN(params, lr=lr), "hesscale_gn"),
    "AdaHesScale, paper": Method(lambda params, lr: hesscale.AdaHesScale(params, lr=lr, bound=None), "hesscale"),
    "AdaHesScaleGN, paper": Method(lambda params, lr: hesscale.AdaHesScaleGN(params, lr=lr, bound=None), "hesscale_gn"),
    "Adam, trust region": Method(lambda params, lr: TrustRegion(_adam(params, lr), DELTA), "hesscale", by_entry=False),
}


def settings(quick: bool) -> dict[str, Any]:
    """What config.json says; quick: CartPole alone, three step sizes, five seeds, a sixth of the steps."""
    return {
        "environments": ["CartPole"] if quick else [*ENVIRONMENTS],
        "algorithms": [*ALGORITHMS],
        "optimizers": [*METHODS],
        "delta": DELTA,
        "rates": [1e-3, 1e-2, 1e-1] if quick else [*RATES],
        "seeds": TOGETHER if quick else SEEDS,
        "steps": STEPS // 6 if quick else STEPS,
    }


def cells(config: Mapping[str, Any]) -> list[tuple[str, str, str, int]]:
    """Environment, algorithm, optimizer and first seed: all of them with the first seeds before any more of them."""
    return [
        (environment, algorithm, optimizer, first)
        for first in range(0, config["seeds"], TOGETHER)
        for environment in config["environments"]
        for optimizer in config["optimizers"]
        for algorithm in config["algorithms"]
    ]


def measure_cell(
    cell: tuple[Any, ...], config: Mapping[str, Any], *, data: Path | None, folder: Path
) -> Iterator[dict[str, Any]]:
    """One record per step size and seed. The curve is None where no episode ended."""
    environment, algorithm, optimizer, first = cell
    runs = Runs(
        ENVIRONMENTS[environment],
        ALGORITHMS[algorithm],
        METHODS[optimizer],
        rates=config["rates"],
        seeds=range(first, min(first + TOGETHER, config["seeds"])),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of leaps, which are counted here
        found = curves(runs, config["steps"])
    for (lr, seed), curve, alive in zip(runs.settings, found, runs.alive, strict=True):
        shown = [None if value is None else float(f"{value:.6g}") for value in curve]
        where = {"environment": environment, "algorithm": algorithm, "optimizer": optimizer, "first": first}
        yield {"kind": "reinforcement", **where, "lr": lr, "seed": seed, "finite": alive, "curve": shown}


def is_record(record: Record) -> bool:
    """Whether a record has what tables and figures need."""
    curve = record["curve"]
    return (
        record["environment"] in ENVIRONMENTS
        and all(isinstance(record[key], str) for key in ("algorithm", "optimizer"))
        and is_size(record["lr"])
        and all(isinstance(record[key], int) for key in ("first", "seed", "finite"))
        and len(curve) == WINDOWS
        and all(value is None or is_size(abs(value)) for value in curve)
    )


def gains(record: Record) -> list[float]:
    """The curve from 0 (actions at random) to 1 (solved); where no episode ended, as in the window before."""
    environment, found = ENVIRONMENTS[record["environment"]], [0.0]
    for value in record["curve"]:
        gain = found[-1] if value is None else (value - environment.random) / (environment.solved - environment.random)
        found.append(gain)
    return found[1:]


@dataclass(frozen=True)
class Outcome:
    """Of the runs with one step size: the last tenth's return, and the share that collapsed."""

    runs: int
    mean: float  # return
    error: float  # its standard error over seeds
    gain: float  # on the scale of all environments
    collapsed: float
    broken: float  # not finite


def outcome(records: Sequence[Record]) -> Outcome:
    """A run that is not finite has collapsed, and counts with what it did until then, standing still."""
    environment = ENVIRONMENTS[records[0]["environment"]]
    curves_ = [gains(record) for record in records]
    finals = torch.tensor([curve[-1] for curve in curves_], dtype=torch.float64)
    fell = [
        not record["finite"] or (max(curve) > 0.1 and curve[-1] < COLLAPSE * max(curve))
        for record, curve in zip(records, curves_, strict=True)
    ]
    width = environment.solved - environment.random
    spread = float(finals.std()) / len(finals) ** 0.5 if len(finals) > 1 else 0.0
    gain = float(finals.mean())
    return Outcome(
        len(records),
        environment.random + width * gain,
        width * spread,
        gain,
        sum(fell) / len(fell),
        sum(not record["finite"] for record in records) / len(records),
    )
