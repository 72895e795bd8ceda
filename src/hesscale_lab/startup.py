"""What the command needs before any import: how Ctrl-C ends it, and what to install if a module is missing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 130
"""The exit code of a command that Ctrl-C stopped: 128 + SIGINT."""

_EXTRAS = {
    "lab": ("PIL", "matplotlib", "numpy", "pooch", "ray", "rich", "sklearn", "typer"),
    "tensorboard": ("tensorboard",),
}
"""The modules that each extra of pyproject.toml installs."""


@contextmanager
def end_at_ctrl_c() -> Iterator[None]:
    """Ends the process at once on Ctrl-C. Some libraries catch KeyboardInterrupt and go on without what they import."""
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # otherwise the caller has set its own
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*signal_and_frame: object) -> None:
    os.write(2, b"hesscale: stopped before anything was begun\n")
    os._exit(STOPPED)


def what_to_install(error: ModuleNotFoundError) -> str:
    """One line that names the missing module and its extra; raises the error again if the module is hesscale's."""
    module = (error.name or "").partition(".")[0]
    if not module or module.startswith("hesscale"):
        raise error
    extra = next((name for name, modules in _EXTRAS.items() if module in modules), None)
    wanted = module if extra is None else f"'hesscale[{extra}]'"
    return f"this needs {module}: pip install {wanted}"
