"""The start of the ``hesscale`` command, also as ``python -m hesscale_lab``."""

from __future__ import annotations

import sys

from .startup import end_at_ctrl_c, what_to_install


def main() -> None:
    """Runs the command; if the lab's extra is not installed, one line says how to install it."""
    try:
        with end_at_ctrl_c():
            from .cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"hesscale: {what_to_install(error)}")
    app()


if __name__ == "__main__":
    main()
