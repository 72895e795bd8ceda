"""Ctrl-C while libraries are imported: a line, where an exception would end as a traceback from within one of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CODE = 130
"""With which a command ends that Ctrl-C stopped: 128 + SIGINT."""


@contextmanager
def end_at_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once in here, where nothing is begun yet that could be lost.

    An exception would not do: some libraries catch it and go on without what they were about to import.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, or somebody else's
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*signal_and_frame: object) -> None:
    os.write(2, b"hesscale: stopped before anything was begun\n")
    os._exit(CODE)
