"""Accuracy against sparsity: a column per network, one-shot above, fine-tuned below, a line per saliency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..report.estimate import estimate
from ..studies.pruning import SUBJECTS
from .drawn import Config, Drawn, Records, draw_line, tidy, verbatim

STYLES = {
    "magnitude": ("#222222", "P"),
    "g² per example": ("#8C8C8C", "X"),
    "HesScaleGN": ("#56B4E9", "s"),
    "HesScale": ("#0072B2", "o"),
    "HesScale, h < 0 as 0": ("#0072B2", "1"),
    "HesScale, −gw + ½hw²": ("#CC79A7", "d"),
    "HesScale rank=1": ("#D55E00", "v"),
    "HesScale rank=3": ("#E69F00", "^"),
    "GGN-MC": ("#009E73", "<"),
    "exact": ("#7A4B9A", "*"),
}
_ROWS = {"one_shot": "one-shot", "fine_tuned": "fine-tuned"}
_CAPTION = (
    "Test accuracy against the share of weights removed, means over seeds with bars of ± 2 standard errors. Dotted: "
    "not pruned. Within a panel saliencies share networks and images; lines lie beside each other to be told apart."
)


def figures(config: Config, records: Records) -> Iterator[Drawn]:
    """One figure; none without records."""
    networks = [name for name in config["subjects"] if any(record["network"] == name for record in records)]
    if not networks:
        return
    figure = Figure(figsize=(4.0 * len(networks), 6.6), layout="constrained", dpi=150)
    panels = figure.subplots(2, len(networks), squeeze=False, sharex="col")
    for row, (key, words) in zip(panels, _ROWS.items(), strict=True):
        for axes, network in zip(row, networks, strict=True):
            own = [record for record in records if record["network"] == network]
            _draw(axes, own[0]["sparsities"], own, key)
            if key == "one_shot":
                axes.set_title(verbatim(SUBJECTS[network].title if network in SUBJECTS else network), fontsize="small")
        row[0].set_ylabel(f"test accuracy, {words}")
    handles = {
        label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    for axes in panels[1]:
        axes.set_xlabel("weights removed")
    yield Drawn("pruning", _CAPTION, figure)


def _draw(axes: Axes, sparsities: Sequence[float], records: Records, key: str) -> None:
    dense = estimate([record["dense"] for record in records]).mean
    axes.axhline(dense, color="#777777", linewidth=1, linestyle=":")
    for place, (name, (color, marker)) in enumerate(STYLES.items()):
        own = [record for record in records if record["saliency"] == name]
        if not own:
            continue
        found = [estimate([record[key][n] for record in own]) for n in range(len(sparsities))]
        beside = 0.02 * (place - len(STYLES) / 2)
        places = [n + beside for n in range(len(sparsities))]
        draw_line(axes, places, found, color=color, marker=marker, label=name)
    axes.set_xticks(range(len(sparsities)), [f"{share:.0%}" for share in sparsities])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    tidy(axes)
