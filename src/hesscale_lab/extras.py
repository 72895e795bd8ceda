"""What to install when something is missing. This file needs nothing itself."""

from __future__ import annotations

_EXTRAS = {
    "lab": ("PIL", "matplotlib", "numpy", "pooch", "ray", "rich", "sklearn", "typer"),
    "tensorboard": ("tensorboard",),
}
"""The modules of the extras that commands need, by the extra's name in pyproject.toml."""


def what_to_install(error: ModuleNotFoundError) -> str:
    """One line about the module that was not found; the error again if it is a part of hesscale itself."""
    module = (error.name or "").partition(".")[0]
    if not module or module.startswith("hesscale"):
        raise error
    extra = next((name for name, modules in _EXTRAS.items() if module in modules), None)
    wanted = module if extra is None else f"'hesscale[{extra}]'"
    return f"this needs {module}: pip install {wanted}"
