"""The options of optimizers, as ``train`` and ``sweep`` declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from ..options import Options, combinations

Every = Annotated[str | None, typer.Option(help="Refresh curvature in every k-th step only [default: 1].")]
Eps = Annotated[str | None, typer.Option(help="Added below the fraction of a step [default: 1e-8].")]
Bound = Annotated[str | None, typer.Option(help="No entry moves by more than lr times it [default: none].")]
TrustRegion = Annotated[str | None, typer.Option(help="Bounds the quadratic model's change [default: none].")]
Rank = Annotated[str | None, typer.Option(help="Columns carried beside the diagonal, or full [default: 0].")]


def one_combination(texts: Mapping[str, str | None]) -> Options:
    """What was given; ValueError if it is several values."""
    for name, text in texts.items():
        if text is not None and "," in text:
            raise ValueError(
                f"--{name.replace('_', '-')} is one value here, not {text!r}: hesscale sweep takes several"
            )
    return combinations(texts)[0]
