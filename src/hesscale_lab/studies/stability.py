"""Which optimizers survive being dropped in: twenty steps on many small networks, and whether the loss fell.

With random labels the batch stays the same and its own loss counts; with learnable ones every step has a new batch, and
a batch apart counts. All optimizers get the same networks, batches and step sizes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hesscale
from hesscale.optim import CurvatureScaled

from ..tasks.small_networks import DATA, SMALL_NETWORKS, SmallNetwork
from ..tasks.tiny_transformers import tiny_transformers
from .reading import Record, is_size

STEPS = 20
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
CELLS = ((2, DATA[0]), (32, DATA[1]), (8, DATA[0]), (32, DATA[0]), (8, DATA[1]))
"""Batch sizes and data."""
BOUNDS = (None, 1.0, 3.0, 10.0)

_QUICK = 8  # every so many networks are in the quick version
_APART = 64  # examples whose loss counts where data can be learnt
_GAMMA = 0.05  # of Sophia-G, for language models of 125 million parameters

Make = Callable[[Any, float], torch.optim.Optimizer]


def _sophia(params: Any, lr: float) -> CurvatureScaled:
    """lr · clip(m / (γh), 1) = (lr/γ) · clip(m / h, γ), h an average of Gauss-Newton samples of every tenth step."""
    options: dict[str, Any] = {"scale": "mean", "every": 10, "betas": (0.965, 0.99), "eps": 1e-12, "weight_decay": 0.0}
    return hesscale.AdaGGNMC(params, lr=lr / _GAMMA, bound=_GAMMA, **options)


def _ours(preset: type[CurvatureScaled], **options: Any) -> Make:
    return lambda params, lr: preset(params, lr=lr, **options)


def _methods() -> dict[str, Make]:
    found: dict[str, Make] = {
        "Adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
        "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr),
        "AdaHessian": _ours(hesscale.AdaHessian, eps=1e-4, bound=None),
        "Sophia-G": _sophia,
    }
    for preset in (hesscale.AdaHesScale, hesscale.AdaHesScaleGN):
        for bound in BOUNDS:
            name = preset.__name__ + (", paper" if bound is None else f", bound {bound:g}")
            found[name] = _ours(preset, bound=bound)
    return found


METHODS: Mapping[str, Make] = _methods()


def networks() -> dict[str, SmallNetwork]:
    """All that take part, by name; those of the transformers library where it is installed."""
    return {**SMALL_NETWORKS, **tiny_transformers()}


def settings(quick: bool) -> dict[str, Any]:
    """What config.json says; quick: every eighth network."""
    chosen = [*networks()][:: _QUICK if quick else 1]
    return {"networks": chosen, "optimizers": [*METHODS], "rates": [*RATES], "steps": STEPS}


def cells(config: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Network, batch size and data. All networks once before any of them again: a run cut short has seen them all."""
    return [(name, batch, data) for batch, data in CELLS for name in config["networks"]]


def measure_cell(
    cell: tuple[Any, ...], config: Mapping[str, Any], *, data: Path | None, folder: Path
) -> Iterator[dict[str, Any]]:
    """The records of one cell; data is made, not read."""
    name, batch, kind = cell
    return measure(name, networks()[name], batch=batch, data=kind)


def measure(name: str, network: SmallNetwork, *, batch: int, data: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """One record per optimizer and step size. Losses have six digits, and are None where they are not finite."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network.make()
        for method, make in METHODS.items():
            for lr in RATES:
                torch.manual_seed(seed)
                feed = _Feed(network, batch, data, seed)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what optimizers warn of is counted here
                    start, end, top = _trained(copy.deepcopy(model), make, lr, feed)
                found = {"start": start, "end": end, "top": top}
                finite = {key: float(f"{value:.6g}") if math.isfinite(value) else None for key, value in found.items()}
                cell = {"network": name, "batch": batch, "data": data, "seed": seed}
                yield {"kind": "stability", **cell, "optimizer": method, "lr": lr, **finite}


class _Feed:
    """The batches of a training, and the one whose loss counts."""

    def __init__(self, network: SmallNetwork, batch: int, data: str, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._next = lambda count: network.batch(count, data, self._generator)
        self._batch, self._same = batch, data == DATA[0]
        self.judge: tuple[Tensor, Tensor] = self._next(batch if self._same else _APART)

    def next(self) -> tuple[Tensor, Tensor]:
        """The batch of the next step."""
        return self.judge if self._same else self._next(self._batch)


def _trained(model: nn.Module, make: Make, lr: float, feed: _Feed) -> tuple[float, float, float]:
    """The loss at first, at last, and at its highest in between; infinite once a gradient or a loss is not finite."""
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
        for context in _differentiable_twice() if isinstance(optimizer, hesscale.AdaHessian) else ():
            stack.enter_context(context)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.backward(loss) if isinstance(optimizer, CurvatureScaled) else loss.backward()
    optimizer.step()
    return loss.item()


def _differentiable_twice() -> Iterator[AbstractContextManager[Any]]:
    """Kernels that have a second derivative: fused attention and recurrent layers have none."""
    yield sdpa_kernel(SDPBackend.MATH)
    yield torch.backends.mkldnn.flags(enabled=False)


def is_record(record: Record) -> bool:
    """Whether a record has what the table needs."""
    words = all(isinstance(record[key], str) for key in ("network", "data", "optimizer"))
    return (
        words
        and isinstance(record["batch"], int)
        and is_size(record["lr"])
        and is_size(record["start"])
        and all(record[key] is None or is_size(record[key]) for key in ("end", "top"))
    )


@dataclass(frozen=True)
class Share:
    """Of some runs, how many, and the parts of them that ended badly."""

    runs: int
    worse: float  # ended above their start, or not finite
    broken: float  # ended not finite
    spiked: float  # had a loss above 1.5 times the first plus a half, or not finite


def share(records: Sequence[Record]) -> Share:
    """The shares among these records."""
    count = len(records)
    broken = sum(record["end"] is None for record in records)
    worse = sum(record["end"] is not None and record["end"] > record["start"] for record in records)
    spiked = sum(record["top"] is None or record["top"] > 1.5 * record["start"] + 0.5 for record in records)
    return Share(count, (worse + broken) / count, broken / count, spiked / count)
