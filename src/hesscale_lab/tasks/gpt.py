"""A small GPT in plain torch: blocks of causal attention and a two-layer network, each added to what came before."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_DEVIATION = 0.02  # of the first weights


class Attention(nn.Module):
    """Every place looks at itself and at the places before it, in several heads."""

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
    """From symbols [N, T] to logits of the next one at every place, [N · T, symbols]: a row for every label."""

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


def gpt(
    *, symbols: int, context: int, width: int, layers: int, heads: int, generator: torch.Generator | None = None
) -> GPT:
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
