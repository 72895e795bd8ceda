"""The ``hesscale`` command, from the first moment: ``python -m hesscale_lab`` is the same."""

from __future__ import annotations

from .interrupts import end_at_ctrl_c


def main() -> None:
    """Runs the command."""
    with end_at_ctrl_c():
        from .cli import app
    app()


if __name__ == "__main__":
    main()
