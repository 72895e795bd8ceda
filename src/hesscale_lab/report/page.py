"""A report as one HTML page that needs nothing else: pictures and style are inside, no script, nothing is fetched."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..wording import Table


@dataclass(frozen=True)
class Picture:
    """A figure as PNG, for wide and for narrow screens, with what a reader needs to trust it."""

    caption: str
    alt: str
    wide: bytes
    narrow: bytes | None
    commands: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A heading with its tables, pictures and paragraphs, in order."""

    title: str
    anchor: str
    blocks: tuple[Picture | Table | str, ...]


_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --soft: #5b6168; --back: #fbfbfa; --card: #ffffff; --line: #dcdfe3;
  --link: #0b62a0; --stripe: #f3f4f5; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ea; --soft: #a2a9b1; --back: #16181b; --card: #1e2125;
  --line: #353a40; --link: #7cc0f5; --stripe: #24282d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 1.5rem clamp(0.9rem, 2vw, 1.5rem) 4rem; background: var(--back);
  color: var(--text); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 0.3rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 0.8rem; padding-top: 0.8rem; border-top: 1px solid var(--line); }
p, figcaption, .note { max-width: 48rem; }
.soft, .note { color: var(--soft); font-size: 0.9rem; }
a { color: var(--link); }
nav ol { padding-left: 1.4rem; margin: 0.4rem 0; }
figure { margin: 1.4rem 0 2rem; }
.card { background: #ffffff; border-radius: 8px; padding: 0.4rem; width: fit-content; max-width: 100%;
  box-shadow: 0 0 0 1px #dcdfe3; }
figure img { display: block; max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { .card { filter: invert(0.89) hue-rotate(180deg); } }
figcaption { margin-top: 0.6rem; font-size: 0.95rem; }
.pan { overflow-x: auto; }
@media (max-width: 640px) { .pan img { max-width: none; width: 48rem; } }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%; margin: 0.9rem 0 0.5rem;
  border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 0.84rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
caption { text-align: left; font-weight: 600; padding: 0.6rem 0.7rem 0.2rem; }
th, td { padding: 0.36rem 0.5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { white-space: normal; vertical-align: bottom; color: var(--soft); font-weight: 600; min-width: 3.2rem; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
tbody tr:last-child > * { border-bottom: 0; }
tbody tr:nth-child(even) > * { background: var(--stripe); }
details { margin-top: 0.4rem; }
figcaption details { color: var(--soft); font-size: 0.85rem; }
summary { cursor: pointer; }
code { font: 0.92em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
details ul { margin: 0.3rem 0; padding-left: 1.2rem; }
"""


_LONG = 20
"""A table with more rows is folded away."""


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    contents = "".join(f'<li><a href="#{escape(s.anchor)}">{escape(s.title)}</a></li>' for s in sections)
    body = "".join(_section(section) for section in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1>\n<p class="soft">{escape(lead)}</p></header>\n'
        f'<nav aria-label="Contents"><strong>Contents</strong><ol>{contents}</ol></nav>\n'
        f"<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    blocks = "".join(_block(block) for block in section.blocks)
    return f'<section id="{escape(section.anchor)}">\n<h2>{escape(section.title)}</h2>\n{blocks}</section>\n'


def _block(block: Picture | Table | str) -> str:
    if isinstance(block, Picture):
        return _picture(block)
    return _table(block) if isinstance(block, Table) else f"<p>{escape(block)}</p>\n"


def _picture(picture: Picture) -> str:
    image = f'<img src="{_data(picture.wide)}" alt="{escape(picture.alt)}">'
    if picture.narrow:
        narrow = f'<source media="(max-width: 640px)" srcset="{_data(picture.narrow)}">'
        shown = f'<div class="card"><picture>{narrow}{image}</picture></div>'
    else:  # on a phone it stays large enough to read, and moves sideways in its own frame
        shown = f'<div class="card pan" tabindex="0" role="region" aria-label="Figure">{image}</div>'
    return f"<figure>{shown}\n<figcaption>{escape(picture.caption)}{_origin(picture)}</figcaption></figure>\n"


def _origin(picture: Picture) -> str:
    """The commands and environments behind a figure, folded away."""
    commands = "".join(f"<li><code>{escape(command)}</code></li>" for command in picture.commands if command)
    environments = "".join(f"<li>{escape(line)}</li>" for line in picture.environments if line)
    if not commands and not environments:
        return ""
    return f"<details><summary>How this was made</summary><ul>{commands}</ul><ul>{environments}</ul></details>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>\n' if table.note else ""
    # focusable, so that a keyboard can scroll it too
    text = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f"<caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n{note}"
    )
    if len(table.rows) <= _LONG:
        return text
    return f"<details><summary>{escape(table.title)}: {len(table.rows)} rows</summary>\n{text}</details>\n"


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode('ascii')}"
