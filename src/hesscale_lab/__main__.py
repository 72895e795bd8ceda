"""The ``hesscale`` command, from the first moment: ``python -m hesscale_lab`` is the same."""

from __future__ import annotations

import sys

from .startup import end_at_ctrl_c, what_to_install


def main() -> None:
    """Runs the command; without the lab's extra, says in one line how to get it."""
    try:
        with end_at_ctrl_c():
            from .cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"hesscale: {what_to_install(error)}")
    app()


if __name__ == "__main__":
    main()
