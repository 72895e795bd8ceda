"""Large tensors in chunks: the same numbers, and memory for a chunk only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hesscale.fast import chunking
from hesscale.rules import RULES

ROWS, WIDTH = 512, 1024
CHUNK = 1 << 13
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softmax": lambda x: x.softmax(-1),
    "log-softmax": lambda x: x.log_softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, [WIDTH]),
    "batch norm": lambda x: F.batch_norm(x.view(16, 32, 32, 32), None, None, training=True),
}


class Sizes(TorchDispatchMode):
    """How many elements each new tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        new = (t for t in tree_leaves(result) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given)
        self.made += [t.numel() for t in new]
        return result


def curvature(name: str) -> tuple[Tensor, int]:
    """What the rule of a function returns for a large input, and how many large tensors it made."""
    generator = torch.Generator().manual_seed(0)
    x, s, g = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3))
    y = FUNCTIONS[name](x.requires_grad_())
    node: Any = y.grad_fn
    others = (None,) * (len(node._input_metadata) - 1)
    wanted = [y.shape, *(None for _ in node.next_functions[1:])]
    with torch.no_grad(), Sizes() as sizes:
        found = RULES[node.name()](node, (s.view(y.shape), *others), (g.view(y.shape), *others), wanted)
    assert isinstance(found[0], Tensor)
    return found[0], sum(size > 2 * CHUNK for size in sizes.made)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_the_result_is_large(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "is_large", lambda x: False)
    monkeypatch.setattr("hesscale.rules.families.is_large", lambda x: False)
    whole, _ = curvature(name)
    monkeypatch.undo()
    monkeypatch.setattr(chunking, "_CACHED", CHUNK // torch.get_num_threads())
    found, large = curvature(name)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    assert found.stride() == whole.stride()
    assert large == 1


@pytest.mark.parametrize("length", [64, 4096])
def test_attention_matrices_are_never_there_as_a_whole(length: int) -> None:
    q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
    node: Any = F.scaled_dot_product_attention(q, k, v).grad_fn
    others = (None,) * (len(node._input_metadata) - 1)
    seed = (torch.randn(1, 2, length, 16), *others)
    wanted = [q.shape, k.shape, v.shape, *(None for _ in node.next_functions[3:])]
    with torch.no_grad(), Sizes() as sizes:
        RULES[node.name()](node, seed, seed, wanted)
    assert max(sizes.made) <= max(128 * length, chunking.chunk_size(q))


def test_channels_last_is_kept() -> None:
    """The curvature of an image is laid out as its gradient is."""
    x = torch.randn(8, 32, 32, 32).contiguous(memory_format=torch.channels_last).requires_grad_()
    node: Any = F.batch_norm(x, None, None, training=True).grad_fn
    seed = torch.randn(x.shape).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        found = RULES[node.name()](node, (seed,), (seed,), [x.shape, None, None])
    assert found[0] is not None
    assert found[0].is_contiguous(memory_format=torch.channels_last)
