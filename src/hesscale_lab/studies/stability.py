"""Which optimizers survive being dropped in: twenty steps on many small networks, and whether the loss fell.

With random labels every step has the same batch, whose loss counts. With learnable labels every step has a new batch,
and the loss of a held-out batch counts. All optimizers get the same networks, batches and step sizes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hesscale
from hesscale.optim import CurvatureScaled

from ..tasks.small_networks import DATA, SMALL_NETWORKS, SmallNetwork, tiny_transformers
from ..wording import Table, counted
from .study import Cell, Config, Record, Records, Study, by, has, is_size, is_whole, is_word

STEPS = 20
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
CELLS = ((2, DATA[0]), (32, DATA[1]), (8, DATA[0]), (32, DATA[0]), (8, DATA[1]))
"""Batch sizes and data."""
BOUNDS = (None, 1.0, 3.0, 10.0)

_QUICK = 8  # every so many networks are in the quick version
_HELD_OUT = 64  # examples whose loss counts where labels are learnable
_GAMMA = 0.05  # of Sophia-G, for language models of 125 million parameters

Make = Callable[[Any, float], torch.optim.Optimizer]


def _sophia(params: Any, lr: float) -> CurvatureScaled:
    """lr · clip(m / (γh), 1) = (lr/γ) · clip(m / h, γ); h averages a Gauss-Newton sample of every tenth step."""
    options: dict[str, Any] = {"scale": "mean", "every": 10, "betas": (0.965, 0.99), "eps": 1e-12, "weight_decay": 0.0}
    return hesscale.AdaGGNMC(params, lr=lr / _GAMMA, bound=_GAMMA, **options)


def _ours(preset: type[CurvatureScaled], **options: Any) -> Make:
    return lambda params, lr: preset(params, lr=lr, **options)


def _methods() -> dict[str, Make]:
    methods: dict[str, Make] = {
        "Adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
        "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr),
        "AdaHessian": _ours(hesscale.AdaHessian, eps=1e-4, bound=None),
        "Sophia-G": _sophia,
    }
    for preset in (hesscale.AdaHesScale, hesscale.AdaHesScaleGN):
        for bound in BOUNDS:
            name = preset.__name__ + (", paper" if bound is None else f", bound {bound:g}")
            methods[name] = _ours(preset, bound=bound)
    return methods


METHODS: Mapping[str, Make] = _methods()


def networks() -> dict[str, SmallNetwork]:
    """The networks by name; those of the transformers library where it is installed."""
    return {**SMALL_NETWORKS, **tiny_transformers()}


def settings(quick: bool) -> Config:
    """The content of config.json; quick: every eighth network."""
    chosen = [*networks()][:: _QUICK if quick else 1]
    return {"networks": chosen, "optimizers": [*METHODS], "rates": [*RATES], "steps": STEPS}


def cells(config: Config) -> list[Cell]:
    """Network, batch size and data; all networks once before any of them again."""
    return [(name, batch, data) for batch, data in CELLS for name in config["networks"]]


def measure(cell: Cell, config: Config, *, data: Path | None, folder: Path) -> Iterator[Record]:
    """The records of a cell; its data is made, not read."""
    name, batch, kind = cell
    return measure_network(name, networks()[name], batch=batch, data=kind)


def measure_network(name: str, network: SmallNetwork, *, batch: int, data: str, seed: int = 0) -> Iterator[Record]:
    """A record for each optimizer and step size. Losses have six digits, and are None where they are not finite."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network.make()
        for method, make in METHODS.items():
            for lr in RATES:
                torch.manual_seed(seed)
                feed = _Feed(network, batch, data, seed)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # optimizers warn of what is counted here
                    start, end, top = _trained(copy.deepcopy(model), make, lr, feed)
                losses = {"start": start, "end": end, "top": top}
                finite = {key: float(f"{value:.6g}") if math.isfinite(value) else None for key, value in losses.items()}
                cell = {"network": name, "batch": batch, "data": data, "seed": seed}
                yield {"kind": "stability", **cell, "optimizer": method, "lr": lr, **finite}


class _Feed:
    """The batches of a training, and the batch whose loss counts."""

    def __init__(self, network: SmallNetwork, batch: int, data: str, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._next = lambda count: network.batch(count, data, self._generator)
        self._batch, self._same = batch, data == DATA[0]
        self.judge: tuple[Tensor, Tensor] = self._next(batch if self._same else _HELD_OUT)

    def next(self) -> tuple[Tensor, Tensor]:
        """The batch of the next step."""
        return self.judge if self._same else self._next(self._batch)


def _trained(model: nn.Module, make: Make, lr: float, feed: _Feed) -> tuple[float, float, float]:
    """The first, last and highest loss; the last two are infinite if a gradient or a loss was not finite."""
    optimizer = make(model.parameters(), lr)
    start = top = _judged(model, feed.judge)
    for _ in range(STEPS):
        try:
            loss = _step(model, optimizer, feed.next())
        except RuntimeError as error:
            if "not finite" not in str(error):
                raise
            return start, math.inf, math.inf
        if not math.isfinite(loss):
            return start, math.inf, math.inf
        top = max(top, loss)
    return start, _judged(model, feed.judge), top


def _judged(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(batch[0]), batch[1]))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    optimizer.zero_grad()
    with ExitStack() as stack:
        if isinstance(optimizer, hesscale.AdaHessian):  # fused attention and recurrent layers have no second derivative
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.backward(loss) if isinstance(optimizer, CurvatureScaled) else loss.backward()
    optimizer.step()
    return loss.item()


@dataclass(frozen=True)
class Share:
    """The number of some runs, and the shares of them that ended badly."""

    runs: int
    worse: float  # ended above their start, or not finite
    broken: float  # ended not finite
    spiked: float  # had a loss above 1.5 times the first plus a half, or not finite


def share(records: Records) -> Share:
    """The shares among these records."""
    count = len(records)
    broken = sum(record["end"] is None for record in records)
    worse = sum(record["end"] is not None and record["end"] > record["start"] for record in records)
    spiked = sum(record["top"] is None or record["top"] > 1.5 * record["start"] + 0.5 for record in records)
    return Share(count, (worse + broken) / count, broken / count, spiked / count)


def tables(config: Config, records: Records) -> Iterator[Table]:
    """The share of runs that ended badly, by optimizer and step size."""
    if not records:
        return
    rates = sorted({record["lr"] for record in records})
    networks = counted(len({record["network"] for record in records}), "network")
    rows = []
    for name, some in by(records, "optimizer").items():
        total, by_rate = share(some), by(some, "lr")
        worse = (share(by_rate[lr]).worse if lr in by_rate else None for lr in rates)
        values = (*worse, total.worse, total.broken, total.spiked)
        rows.append((name, *("" if value is None else f"{100 * value:.1f}" for value in values)))
    yield Table(
        f"Runs that ended above their start or not finite, in percent: {networks}, {STEPS} steps",
        ("optimizer", *(f"lr {lr:g}" for lr in rates), "all", "not finite", "spiked"),
        tuple(rows),
        "Batches of 2, 8 and 32. Spiked: a loss above 1.5 times the first plus a half on the way.",
    )


def rows(records: Records) -> Iterator[Record]:
    """Shares by optimizer, step size, batch size and data."""
    keys = ("optimizer", "lr", "batch", "data")
    for cell, some in by(records, *keys).items():
        part = share(some)
        shares = {"worse": part.worse, "not_finite": part.broken, "spiked": part.spiked}
        counts = {"runs": part.runs, **{name: f"{value:.4f}" for name, value in shares.items()}}
        yield {**dict(zip(keys, cell, strict=True)), **counts}


def _is_loss(value: object) -> bool:
    return value is None or is_size(value)


STUDY = Study(
    "which optimizers survive being dropped in: twenty steps on small networks of all common kinds (half an hour)",
    settings,
    cells,
    ("network", "batch", "data"),
    measure,
    {
        "stability": has(
            **dict.fromkeys(("network", "data", "optimizer"), is_word),
            **dict.fromkeys(("lr", "start"), is_size),
            **dict.fromkeys(("end", "top"), _is_loss),
            batch=is_whole,
        )
    },
    tables,
    rows,
)
