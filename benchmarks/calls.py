"""How many functions of our own a pass and a step of a two-layer MLP call, and through how many files.

    python benchmarks/calls.py

Counted with sys.setprofile in the steady state; torch's functions, and those made by dataclasses and the like, do not
count.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F
from torch import nn

import hesscale

SOURCE = str(Path(hesscale.__file__).parent)


def calls_of(work: Callable[[], object]) -> Counter[tuple[str, str]]:
    """How often each function was called, by file and name."""
    found: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE):
            found[code.co_filename.removeprefix(SOURCE).lstrip("/"), code.co_qualname] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def counts() -> dict[str, Counter[tuple[str, str]]]:
    """Of a pass and of a step."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = hesscale.AdaHesScale(model.parameters())
    x, y = torch.randn(5, 8), torch.arange(5) % 4
    for _ in range(3):  # plans are made, and the update is compiled
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        found = {
            "hesscale.backward": calls_of(lambda loss=loss: hesscale.backward(loss)),
            "optimizer.step": calls_of(optimizer.step),
        }
    return found


def main() -> None:
    """Prints one line each, and with -v every function."""
    for name, found in counts().items():
        files = Counter(file for file, _ in found.elements())
        print(f"{name}: {found.total()} calls through {len(files)} files ({', '.join(files)})")
        if "-v" in sys.argv:
            for (file, function), number in found.most_common():
                print(f"  {number:4} {file} {function}")


if __name__ == "__main__":
    main()
