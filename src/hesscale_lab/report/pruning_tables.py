"""The tables of the study of pruning, for the terminal, the page and its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..studies.pruning import SUBJECTS
from ..studies.reading import Record, by
from ..wording import counted
from .estimate import estimate, percent, plain
from .table import Table, csv_text

_WAYS = {"one_shot": "one-shot", "fine_tuned": "fine-tuned"}


def pruning_tables(config: Mapping[str, Any], records: Sequence[Record]) -> Iterator[Table]:
    """Accuracies by saliency and sparsity, a table per network."""
    for network, own in by(records, "network").items():
        sparsities, rows = own[0]["sparsities"], []
        for name, some in by(own, "saliency").items():
            cells = [percent(estimate([r[way][n] for r in some])) for way in _WAYS for n in range(len(sparsities))]
            rows.append((name, *cells, plain(estimate([r["correlation"] for r in some]), digits=2)))
        title = SUBJECTS[network].title if network in SUBJECTS else network
        dense = percent(estimate([next(iter(some))["dense"] for some in by(own, "seed").values()]))
        yield Table(
            f"Test accuracy after pruning, in percent: {title}, {counted(len(by(own, 'seed')), 'seed')}",
            ("saliency", *(f"{share:.0%}, {words}" for words in _WAYS.values() for share in sparsities), "rank corr."),
            tuple(rows),
            f"Not pruned: {dense}. Means ± standard errors. Rank correlation: Spearman's, of the saliency with the "
            "true change of the loss when one weight is removed.",
        )


def as_csv(records: Sequence[Record]) -> str:
    """Every record: a row per network, seed, saliency, way and sparsity."""
    rows = []
    for record in sorted(records, key=lambda r: (r["network"], r["saliency"], r["seed"])):
        fixed = [record[key] for key in ("network", "saliency", "seed", "dense")]
        for way, words in _WAYS.items():
            for share, value in zip(record["sparsities"], record[way], strict=True):
                rows.append([*fixed, f"{record['correlation']:.4f}", words, share, f"{value:.4f}"])
    header = ("network", "saliency", "seed", "dense", "correlation", "way", "sparsity", "accuracy")
    return csv_text(header, rows)
