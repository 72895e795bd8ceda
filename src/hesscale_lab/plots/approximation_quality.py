"""Figure 1 of the paper: the errors of all methods relative to HesScale's, and layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ..studies.approximation_quality import AS_CODED, REFERENCE, STAGES, ZERO, Summary, summarize
from ..wording import counted
from .drawn import Config, Drawn, Records, tidy, verbatim

_GRAY = "#777777"
_FAMILIES = {"HesScale": "#0072B2", "BL89": "#0072B2", "GGN": "#009E73", "KFAC": "#009E73", "AdaHessian": "#D55E00"}
"""Okabe & Ito's colors: propagated estimates blue, Gauss-Newton green, Hutchinson's probes vermilion, others gray."""

_LAYERS = ("#440154", "#31688E", "#35B779", "#D8A200", "#C2477F", "#222222")
_ROUNDING = 1e-10  # an error below this share of the largest one is rounding: the layer is exact
_SPREAD = 0.5  # height that the seeds of a method take around its line


_CAPTION = (
    "Distance of every estimate from the exact diagonal of the Hessian, in units of HesScale's (left) and layer by "
    "layer (right), on logarithmic scales."
)


def figures(config: Config, records: Records) -> Iterator[Drawn]:
    """One figure with a row of panels for each stage that was measured; none if nothing was."""
    rows = [(stage, summarize(records, stage)) for stage in STAGES]
    rows = [(stage, lines) for stage, lines in rows if lines]
    if not rows:
        return
    height = 1.6 + 0.36 * max(len(lines) for _, lines in rows)
    figure = Figure(figsize=(12, height * len(rows)), layout="constrained", dpi=150)
    panels = figure.subplots(len(rows), 2, width_ratios=(1.35, 1), squeeze=False)
    layers = next(record["layers"] for record in records if record["kind"] == "quality")
    for (stage, lines), (total, by_layer) in zip(rows, panels, strict=True):
        suffix = f", {_stage_name(stage, config)}" if len(rows) > 1 else ""
        _draw_totals(total, lines, f"All parameters{suffix}")
        _draw_layers(by_layer, lines, layers, f"Layer by layer{suffix}")
    figure.suptitle(f"Distance from the exact Hessian diagonal: {_describe(config, rows[0][1])}")
    yield Drawn("quality", _CAPTION, figure)


def _describe(config: Config, lines: Sequence[Summary]) -> str:
    seeds = counted(len(lines[0].relative_by_seed), "seed")
    return f"{verbatim(config['title'])}, {seeds} × {counted(config['examples'], 'example')}"


def _stage_name(stage: str, config: Config) -> str:
    return f"after {counted(config['updates'], 'update')}" if stage == "trained" else "before training"


def _color(method: str) -> str:
    return next((color for family, color in _FAMILIES.items() if method.startswith(family)), _GRAY)


def _draw_totals(axes: Axes, lines: Sequence[Summary], title: str) -> None:
    """A dot per seed, a bar at the mean. The scale is logarithmic because methods differ by orders."""
    reference = next(line.relative for line in lines if line.method == ZERO)
    axes.axvline(reference, color=_GRAY, linewidth=1, linestyle="--", zorder=0)
    shown = [line for line in lines if line.relative > _ROUNDING]
    lowest, highest = (pick(error for line in shown for error in line.relative_by_seed) for pick in (min, max))
    left = 0.75 * min(1.0, reference, lowest)
    for place, line in enumerate(lines):
        color = _color(line.method)
        if line not in shown:
            _write(axes, "exact", left, place, color)
            continue
        heights = [place + offset for offset in _offsets(len(line.relative_by_seed))]
        axes.plot(line.relative_by_seed, heights, "o", color=color, alpha=0.4, markersize=4, markeredgewidth=0)
        axes.plot([line.relative] * 2, [place - 0.34, place + 0.34], color=color, linewidth=3, solid_capstyle="round")
        text = f"{line.relative:,.0f}" if line.relative >= 100 else f"{line.relative:.3g}"
        _write(axes, text, max(line.relative, *line.relative_by_seed), place, color)
    axes.set_yticks(range(len(lines)), [_name(line.method) for line in lines])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(left, 2.5 * max(reference, highest))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 2000 else (1,)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"L1 error / {REFERENCE}'s (dots: seeds, bar: mean, dashes: {ZERO})")
    axes.set_title(title, fontsize="medium")
    tidy(axes)


def _write(axes: Axes, text: str, x: float, y: float, color: str) -> None:
    """Right of a point."""
    axes.annotate(text, (x, y), xytext=(7, 0), textcoords="offset points", va="center", color=color, weight="bold")


def _name(method: str) -> str:
    if method == ZERO:
        return f"{ZERO} (estimate 0)"
    return verbatim(method.replace(AS_CODED, " as coded by the authors"))


def _draw_layers(axes: Axes, lines: Sequence[Summary], layers: Sequence[str], title: str) -> None:
    """The same lines; on each a point per layer. Errors that are mere rounding have no place on a log axis."""
    largest = max(max(line.by_layer) for line in lines)
    seen = [error for line in lines for error in line.by_layer if error > _ROUNDING * largest]
    foot = min(seen) / 4
    for layer, name in enumerate(layers):
        color = _LAYERS[layer % len(_LAYERS)]
        height = 0.5 * (layer / max(1, len(layers) - 1) - 0.5)  # coinciding points stay visible
        label = f"{layer + 1} of {len(layers)}" if name.isdecimal() else verbatim(name)
        for place, line in enumerate(lines):
            error = line.by_layer[layer]
            exact = error <= _ROUNDING * largest
            axes.plot(
                foot if exact else error,
                place + height,
                "o",
                color="white" if exact else color,
                markeredgecolor=color,
                markersize=7,
                alpha=0.85,
                label=label if not place else None,
                zorder=3,
            )
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_yticks(range(len(lines)), [""] * len(lines))
    axes.tick_params(axis="y", length=0)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("mean L1 error (hollow: exact up to rounding)")
    axes.set_title(title, fontsize="medium")
    axes.legend(title="layer", frameon=True, edgecolor="none", fontsize="small", title_fontsize="small", loc="best")
    tidy(axes)


def _offsets(count: int) -> list[float]:
    """``count`` equal steps around zero, so that points which would hide one another stand side by side."""
    return [_SPREAD * (i / (count - 1) - 0.5) if count > 1 else 0.0 for i in range(count)]
