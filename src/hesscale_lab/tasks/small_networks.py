"""Small networks of all common kinds, as a table, with random or learnable labels, to try optimizers on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .networks import Reader

CLASSES = 5
FEATURES, WORDS, LENGTH = 16, 20, 8
SHAPE = (3, 8, 8)  # of an image
DATA = ("random", "learnable")
"""The same batch with random labels in every step; or a new batch with labels that the inputs determine."""

Inputs = Callable[[int, torch.Generator], Tensor]


def vectors(count: int, generator: torch.Generator) -> Tensor:
    """Noise, [count, FEATURES]."""
    return torch.randn(count, FEATURES, generator=generator)


def images(count: int, generator: torch.Generator) -> Tensor:
    """Noise, [count, *SHAPE]."""
    return torch.randn(count, *SHAPE, generator=generator)


def tokens(count: int, generator: torch.Generator) -> Tensor:
    """Words, [count, LENGTH]."""
    return torch.randint(2, WORDS, (count, LENGTH), generator=generator)


def labels(inputs: Tensor) -> Tensor:
    """The class that a fixed random linear map of an input, or of its counts of words, favors."""
    words = not inputs.is_floating_point()
    features = F.one_hot(inputs, WORDS).sum(1).float() if words else inputs.flatten(1)
    directions = torch.randn(features.shape[1], CLASSES, generator=torch.Generator().manual_seed(0))
    return (features @ directions).argmax(1)


@dataclass(frozen=True)
class SmallNetwork:
    """One row: how to make a network, and its inputs."""

    make: Callable[[], nn.Module]
    inputs: Inputs

    def batch(self, count: int, data: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels of ``count`` examples."""
        inputs = self.inputs(count, generator)
        random = data == DATA[0]
        return inputs, torch.randint(CLASSES, (count,), generator=generator) if random else labels(inputs)


ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "tanh": nn.Tanh,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
}


def mlp(depth: int, width: int, activation: str, *, norm: bool) -> nn.Module:
    """An MLP with ``depth`` hidden layers, perhaps with a layer norm before each activation."""
    layers: list[nn.Module] = []
    for inputs in [FEATURES, *[width] * (depth - 1)]:
        layers += [nn.Linear(inputs, width), *([nn.LayerNorm(width)] if norm else []), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


_NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "batch norm": nn.BatchNorm2d,
    "group norm": functools.partial(nn.GroupNorm, 2),
}


def cnn(depth: int, activation: str, norm: str) -> nn.Module:
    """``depth`` 3 × 3 convolutions, the second of which halves the image, then a mean over pixels."""
    layers: list[nn.Module] = []
    for number, inputs in enumerate([SHAPE[0], *[8] * (depth - 1)]):
        made = [_NORMS[norm](8)] if norm in _NORMS else []
        layers += [nn.Conv2d(inputs, 8, 3, 2 if number == 1 else 1, 1), *made, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES))


def recurrent(kind: type[nn.LSTM | nn.GRU], depth: int, *, norm: bool) -> nn.Module:
    """A recurrent network of width 16."""
    return Reader(WORDS, 16, kind(16, 16, depth, batch_first=True), CLASSES, norm=norm)


def transformer(depth: int, activation: str, *, norm_first: bool) -> nn.Module:
    """An encoder of width 16 with two heads."""
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
    )
    return Reader(WORDS, 16, nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), CLASSES)


class Residual(nn.Module):
    """x + scale ∘ body(x), with a learnt scale that starts small, as in ConvNeXt and CaiT."""

    def __init__(self, body: nn.Module, width: int, scale: float) -> None:
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        return x + self.scale * self.body(x)


def residual(depth: int, activation: str, scale: float) -> nn.Module:
    """``depth`` residual blocks of width 32."""
    blocks = [
        Residual(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), ACTIVATIONS[activation](), nn.Linear(64, 32)), 32, scale
        )
        for _ in range(depth)
    ]
    return nn.Sequential(nn.Linear(FEATURES, 32), *blocks, nn.Linear(32, CLASSES))


def _rows() -> Iterator[tuple[str, Callable[[], nn.Module], Inputs]]:
    for depth, width in ((2, 32), (5, 32), (2, 128)):
        for activation in ACTIVATIONS:
            for norm in (False, True):
                name = f"MLP {depth}×{width}, {activation}" + (", layer norm" if norm else "")
                yield name, functools.partial(mlp, depth, width, activation, norm=norm), vectors
    for depth, activations in ((2, [*ACTIVATIONS]), (5, ["ReLU", "GELU"])):
        for activation in activations:
            for kind in ("", *_NORMS):
                name = f"CNN {depth}, {activation}" + (f", {kind}" if kind else "")
                yield name, functools.partial(cnn, depth, activation, kind), images
    for kind_of in (nn.LSTM, nn.GRU):
        for depth in (1, 2):
            for norm in (False, True):
                name = f"{kind_of.__name__} {depth}" + (", layer norm" if norm else "")
                yield name, functools.partial(recurrent, kind_of, depth, norm=norm), tokens
    for depth in (1, 3):
        for activation in ("relu", "gelu"):
            for norm_first in (False, True):
                name = f"transformer {depth}, {activation}, norm {'first' if norm_first else 'last'}"
                yield name, functools.partial(transformer, depth, activation, norm_first=norm_first), tokens
    for activation, scale in (("ReLU", 1e-4), ("GELU", 1e-4), ("GELU", 1.0)):
        yield f"residual 3, {activation}, scale {scale:g}", functools.partial(residual, 3, activation, scale), vectors


SMALL_NETWORKS: Mapping[str, SmallNetwork] = {name: SmallNetwork(make, inputs) for name, make, inputs in _rows()}

_TEXT = {
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "num_labels": CLASSES,
    "attn_implementation": "eager",
}
_USUAL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_ENCODER = {**_TEXT, **_USUAL, "max_position_embeddings": 2 * LENGTH}
_DECODER = {**_ENCODER, "num_key_value_heads": 1}
_IMAGE = {"image_size": SHAPE[1], "num_channels": SHAPE[0], "num_labels": CLASSES, "attn_implementation": "eager"}
_PATCHES = {**_IMAGE, **_USUAL, "patch_size": 4}
_STAGES = {"num_channels": SHAPE[0], "num_labels": CLASSES, "depths": [1, 1], "hidden_sizes": [8, 16]}

_TEXTS: Mapping[str, dict[str, Any]] = {
    "Bert": _ENCODER,
    "Roberta": _ENCODER,
    "Electra": {**_ENCODER, "embedding_size": 16},
    "Albert": {**_ENCODER, "embedding_size": 16},
    "DistilBert": {**_TEXT, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "GPT2": {**_TEXT, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 2 * LENGTH},
    "OPT": {**_ENCODER, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "Llama": _DECODER,
    "Mistral": _DECODER,
    "Qwen2": _DECODER,
}
_IMAGES: Mapping[str, dict[str, Any]] = {
    "ViT": _PATCHES,
    "DeiT": _PATCHES,
    "Beit": _PATCHES,
    "ConvNext": {**_STAGES, "num_stages": 2, "patch_size": 2},
    "ResNet": {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
    "RegNet": {**_STAGES, "embedding_size": 8, "groups_width": 4},
}


class Logits(nn.Module):
    """The logits of a network of the library, without dropout; batch norms see the batch, as in training."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.eval()
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()

    def forward(self, inputs: Tensor) -> Any:
        """[batch, CLASSES]."""
        return self.network(inputs).logits


def _make(name: str, task: str, settings: Mapping[str, Any]) -> nn.Module:
    library: Any = import_module("transformers")
    config = getattr(library, f"{name}Config")(**settings)
    return Logits(getattr(library, f"{name}For{task}Classification")(config))


def tiny_transformers() -> dict[str, SmallNetwork]:
    """The networks by name; none where the library is not installed."""
    if find_spec("transformers") is None:
        return {}
    networks = {}
    for task, table, inputs in (("Sequence", _TEXTS, tokens), ("Image", _IMAGES, images)):
        for name, settings in table.items():
            networks[f"transformers {name}"] = SmallNetwork(functools.partial(_make, name, task, settings), inputs)
    return networks
