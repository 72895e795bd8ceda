"""How Sphinx makes the site of docs/: which extensions, how it looks, and where links out of docs/ lead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hesscale

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/hesscale/hesscale"
SOURCES = f"{REPOSITORY}/blob/main"

project = "hesscale"
author = "The hesscale authors"
copyright = author
version = release = hesscale.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
nitpicky = False  # signatures name torch's types, and the site is built without a network

myst_heading_anchors = 3
myst_html_meta = {
    "description": "The diagonal of the Hessian of any PyTorch model's loss in one backward pass, and what it is for"
}
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Tensors": "Tensors", "Rank": "Rank", "Missing": "Missing"}  # as written, not spelled out
python_maximum_signature_line_length = 88

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "show_signature": False,
    "remove_config_comments": True,
    "show_memory": False,
    "write_computation_times": False,
    "abort_on_example_error": True,
}
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "hesscale: the Hessian diagonal in PyTorch"
html_short_title = "hesscale"
html_baseurl = "https://hesscale.github.io/hesscale/"
html_show_copyright = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [{"name": "GitHub", "url": REPOSITORY, "html": "GitHub", "class": ""}],
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_style = "friendly"
pygments_dark_style = "native"


def to_repository(text: str) -> str:
    """The text, with links to files of the repository outside docs/ leading there; pictures are copied by Sphinx."""
    return re.sub(r"(?<!!)(\[[^\]]*\])\(\.\./([^)#]+)", rf"\1({SOURCES}/\2", text)


def script_of(page: str) -> str | None:
    """The file of the repository that the build made a page of the gallery from; None for other pages."""
    folder, _, name = page.rpartition("/")
    if folder != "gallery":
        return None
    return f"examples/gallery/{'README.rst' if name == 'index' else f'{name}.py'}"


def with_names(signature: str | None) -> str | None:
    """A signature in which aliases of types have their names: within a union autodoc writes how it looks them up."""
    return signature and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", signature)


def with_bars(line: str) -> str:
    """A line of a docstring in which |h| is an absolute value, not a reference; code stays as it is."""
    if line.lstrip().startswith((">>>", "...")):
        return line
    parts = re.split(r"(``.*?``)", line)
    return "".join(part if part.startswith("``") else part.replace("|", r"\|") for part in parts)


def setup(app: Any) -> None:
    """Sphinx calls this; pages, signatures and docstrings are rewritten when they have been read."""

    def rewrite(app: Any, name: str, content: list[str]) -> None:
        content[0] = to_repository(content[0])

    def escape(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
        lines[:] = map(with_bars, lines)

    def name_aliases(
        app: Any, what: str, name: str, thing: Any, options: Any, arguments: str | None, returns: str | None
    ) -> tuple[str | None, str | None]:
        return with_names(arguments), with_names(returns)

    def lead_to_script(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
        if script := script_of(page):
            context["theme_source_view_link"] = f"{SOURCES}/{script}"
            context["theme_source_edit_link"] = f"{REPOSITORY}/edit/main/{script}"

    app.connect("source-read", rewrite)
    app.connect("html-page-context", lead_to_script)
    app.connect("autodoc-process-signature", name_aliases)
    app.connect("autodoc-process-docstring", escape)
