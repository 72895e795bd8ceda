"""Networks of the transformers library with tiny settings, where it is installed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from .small_networks import CLASSES, LENGTH, SHAPE, WORDS, SmallNetwork, images, tokens

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
    """By name; none where the library is not installed."""
    if find_spec("transformers") is None:
        return {}
    found = {}
    for task, table, inputs in (("Sequence", _TEXTS, tokens), ("Image", _IMAGES, images)):
        for name, settings in table.items():
            found[f"transformers {name}"] = SmallNetwork(functools.partial(_make, name, task, settings), inputs)
    return found
