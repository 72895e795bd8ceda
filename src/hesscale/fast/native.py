"""native.cpp, the optimizers' update written by hand: one call moves all parameters, on all of torch's threads.

It sees memory, not tensors: ``row`` refuses whatever it could misread. It is built once, by the system's compiler,
and kept in the user's cache directory. Where that cannot be done there is no library, and the update goes without.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from . import enabled

_PLAIN: Final = (Tensor, torch.nn.Parameter)
_DTYPES: Final = (torch.float32, torch.float64)
_COMPILERS: Final = ("c++", "g++", "clang++")
_FLAGS: Final = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),  # vectors of roots; rounded as torch rounds
)
_TUNED: Final = "-march=native"  # twice as fast; some compilers do not know it
_SECONDS: Final = 120.0  # after which a compiler is given up


class Row(ctypes.Structure):
    """One parameter, as native.cpp has it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("size", "is_double", "scale")),
        *((name, ctypes.c_void_p) for name in ("p", "g", "h", "m", "v", "u")),
        *((name, ctypes.c_double) for name in ("decay", "sign", "weight1", "beta2", "weight2", "step_size", "eps")),
        *((name, ctypes.c_double) for name in ("limit", "top_g", "top_h")),
    )


def row(
    p: Tensor, g: Tensor, h: Tensor | None, m: Tensor, v: Tensor, *, scale: int, numbers: Iterable[float]
) -> Row | None:
    """The row of a parameter, with numbers from ``decay`` to ``limit``; None unless native.cpp can read its memory.

    That is, unless all are dense tensors of one dtype on the CPU, with their entries in the order of those of p.
    """
    shape, dtype = p.shape, p.dtype
    if dtype not in _DTYPES or not p.numel() or p.layout is not torch.strided:
        return None
    if not (p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last)):
        return None
    stride, addresses = p.stride(), []
    for x in (p, g, h, m, v):
        if x is None:
            addresses.append(0)
            continue
        if type(x) not in _PLAIN or not x.is_cpu or x.layout is not torch.strided or x.dtype is not dtype:
            return None
        address = x.data_ptr()
        if x.shape != shape or x.stride() != stride or address == 0 or x.is_neg() or x.is_inference():
            return None  # an address of 0 is that of torch's zeros without memory
        addresses.append(address)
    return Row(p.numel(), dtype is torch.float64, scale, *addresses, 0, *numbers)


def overlap(rows: ctypes.Array[Row]) -> bool:
    """Whether something that is written shares memory with anything else."""
    found: Any = library()
    return bool(found.hesscale_overlap(rows, len(rows)))


def look(rows: ctypes.Array[Row]) -> list[tuple[float, float]]:
    """The largest magnitudes in g and h of each row, inf and nan among them."""
    found: Any = library()
    found.hesscale_look(rows, len(rows), torch.get_num_threads())
    return [(row.top_g, row.top_h) for row in rows]


def update(rows: ctypes.Array[Row]) -> None:
    """Moves m and v, and p, or writes u where there is one."""
    found: Any = library()
    found.hesscale_update(rows, len(rows), torch.get_num_threads())


@functools.cache
def library() -> ctypes.CDLL | None:
    """native.cpp, compiled if need be; None where that fails, for whatever reason, or HESSCALE_PLAIN=1 forbids it."""
    if not enabled():
        return None
    try:
        found = _built()
        number, rows = ctypes.c_int64, ctypes.POINTER(Row)
        found.hesscale_overlap.argtypes, found.hesscale_overlap.restype = [rows, number], number
        for function in (found.hesscale_look, found.hesscale_update):
            function.argtypes, function.restype = [rows, number, number], None
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None
    return found


def _built() -> ctypes.CDLL:
    """The library from the cache, or from the first compiler and flags that work."""
    source = resources.files(__package__).joinpath("native.cpp").read_bytes()
    error: Exception = OSError("there is no C++ compiler")
    for compiler in _compilers():
        for flags in ((*_FLAGS, _TUNED), _FLAGS):
            for folder in _folders():
                try:
                    return _kept(folder, source, [compiler, *flags])
                except OSError as reason:  # the next folder may do
                    error = reason
                except subprocess.SubprocessError as reason:
                    error = reason
                    break
    raise error


def _kept(folder: Path, source: bytes, command: Sequence[str]) -> ctypes.CDLL:
    """The library that ``command`` makes of ``source``, which is compiled only if ``folder`` does not have it."""
    key = hashlib.sha256(b"\0".join([source, *(part.encode() for part in (*command, _machine(command[0])))]))
    path = folder / f"native-{key.hexdigest()[:20]}.so"
    if path.exists():
        with contextlib.suppress(OSError):  # a damaged file is made anew
            return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        code, made = Path(fresh, "native.cpp"), Path(fresh, path.name)
        code.write_bytes(source)
        subprocess.run(
            [*command, str(code), "-o", str(made), "-ldl"], check=True, capture_output=True, timeout=_SECONDS
        )
        os.replace(made, path)  # at once: another process sees all of it or nothing
    return ctypes.CDLL(str(path))


def _compilers() -> Iterator[str]:
    seen: set[str] = set()  # two names of one compiler are tried once
    for name in (os.environ.get("CXX"), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found and os.path.realpath(found) not in seen:
            seen.add(os.path.realpath(found))
            yield found


def _folders() -> Iterator[Path]:
    """Where to keep the library: the user's cache, or else a directory below the system's for temporary files."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    for folder in (Path(home, "hesscale"), Path(tempfile.gettempdir(), f"hesscale-{_user()}")):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_safe(folder):
                yield folder


def _is_safe(folder: Path) -> bool:
    """Whether nobody else could have put something there: what lies there is run."""
    found = folder.stat()
    return found.st_uid == _user() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK)


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


@functools.cache
def _machine(compiler: str) -> str:
    """What a library is made for and by: several machines may share a home directory."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=_SECONDS)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        processor: Any = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    except OSError:
        processor = platform.processor()
    return f"{platform.machine()} {platform.system()} {processor} {version.stdout}"
