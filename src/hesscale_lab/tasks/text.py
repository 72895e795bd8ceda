"""Language modelling on a text with a small GPT, character by character. A character is a byte of UTF-8.

So any text can be read, a model's alphabet does not depend on the text, and in plain English a byte is a character.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .archives import DataError
from .task import WHOLE, WORDS, Field, Labelled, Task

BUNDLED = "hesscale_lab:data/moby_dick_1_to_3.txt"
"""Herman Melville, Moby-Dick (1851), chapters 1 to 3: in the public domain."""

SYMBOLS = 256
_TEST = 10  # the last tenth is for testing


@dataclass(frozen=True)
class TextTask(Task):
    """Windows of a text that follow one another; the label of each character is the one after it."""

    text: str = BUNDLED
    context: int = 64
    width: int = 128
    layers: int = 5
    heads: int = 4

    FIELDS: ClassVar[Mapping[str, Field]] = {
        "text": WORDS,
        **dict.fromkeys(("context", "width", "layers", "heads"), WHOLE),
        **Task.FIELDS,
    }

    def load(self, folder: Path | None) -> tuple[Labelled, Labelled]:
        """The windows before and within the last tenth of the text; of the first, some are drawn for validation."""
        content = read_text(self.text, folder)
        end = len(content) - len(content) // _TEST
        return self._windows(content[:end]), self._windows(content[end:])

    def digest(self, folder: Path | None) -> str | None:
        """The fingerprint of the text; None if it cannot be read."""
        with suppress(DataError):  # a finished run does not need it, and ``load`` says what is wrong
            return sha256(read_text(self.text, folder)).hexdigest()[:16]
        return None

    def make(self, generator: torch.Generator) -> nn.Module:
        """The network, freshly initialized."""
        sizes = {"context": self.context, "width": self.width, "layers": self.layers, "heads": self.heads}
        return gpt(symbols=SYMBOLS, **sizes, generator=generator)

    def prepare(self, examples: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Bytes as whole numbers."""
        return examples.long()

    def with_fields(self, fields: Sequence[tuple[str, Any]]) -> Self:
        """As every task; ValueError if the heads cannot share the width."""
        task = super().with_fields(fields)
        if task.width % task.heads:
            raise ValueError(f"{task.heads} heads cannot share a width of {task.width} equally")
        return task

    def _windows(self, content: bytes) -> Labelled:
        """Bytes [N, context], and the following ones; an incomplete last window is left out."""
        count = (len(content) - 1) // self.context
        if count < 1:
            raise DataError(f"{self.text} is too short for windows of {self.context} characters")
        symbols = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        windows = (symbols[start : start + count * self.context].view(count, self.context) for start in (0, 1))
        examples, labels = windows
        return examples, labels.long()


def read_text(name: str, folder: Path | None = None) -> bytes:
    """The bytes of a file, which may be compressed (.gz); DataError in one sentence if there is none.

    A path below the folder if there is such a file, else as it is; or PACKAGE:PATH, a file of an installed package.
    """
    try:
        content = _find(name, folder)
        return gzip.decompress(content) if name.endswith(".gz") else content
    except ModuleNotFoundError as error:
        raise DataError(f"there is no package {error.name} to read {name} from") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{name} is damaged ({error}): get it again") from error
    except OSError as error:
        raise DataError(f"cannot read the text {name}: {error.strerror or error}") from None


def _find(name: str, folder: Path | None) -> bytes:
    below = folder / name if folder else Path(name)
    path = below if below.is_file() else Path(name)
    package, colon, within = name.partition(":")
    if colon and not path.exists() and package.replace(".", "").isidentifier() and len(package) > 1:
        return files(package).joinpath(within).read_bytes()
    return path.read_bytes()


_DEVIATION = 0.02  # of the first weights


class Attention(nn.Module):
    """Every position attends to itself and to the positions before it, in several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width]."""
        count, length, width = x.shape
        parts = self.inward(x).view(count, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # [N, heads, T, width / heads] each
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.outward(seen.transpose(1, 2).reshape(count, length, width))


class Block(nn.Module):
    """x + attention, then x + network, both of the normalized x."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width]."""
        x = x + self.attention(self.before_attention(x))
        return x + self.network(self.before_network(x))


class GPT(nn.Module):
    """From symbols [N, T] to logits of the next one at every position, [N · T, symbols]: a row for every label."""

    def __init__(self, *, symbols: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.logits = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        """[N · T, symbols]."""
        places = self.places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.logits(self.last(self.blocks(self.symbols(x) + places)))
        return logits.flatten(0, 1)


def gpt(*, symbols: int, context: int, width: int, layers: int, heads: int, generator: torch.Generator) -> GPT:
    """The network with weights of N(0, 0.02²), smaller by √(2 · layers) where they end in a sum, biases 0 (GPT-2)."""
    with torch.device("meta"):
        model = GPT(symbols=symbols, context=context, width=width, layers=layers, heads=heads)
    model = model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_DEVIATION, generator=generator)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        for block in model.blocks:
            for weight in (block.attention.outward.weight, block.network[2].weight):  # type: ignore[union-attr, index]
                weight.div_(math.sqrt(2 * layers))  # type: ignore[operator]
    return model
