"""Models of Hugging Face transformers, built from tiny configurations and trained on nothing: they run as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hesscale

transformers = pytest.importorskip("transformers", reason="the extra [examples] brings it")
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = 50
TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
IMAGE = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 32, "patch_size": 8}
SEQUENCES = {"vocab_size": WORDS, "d_model": 16}
SPEECH = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("CausalLM", "GPT2Config", {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4}),
    "llama": ("CausalLM", "LlamaConfig", {**TEXT, "num_key_value_heads": 2}),
    "llama4": (  # complex rotary embeddings
        "CausalLM",
        "Llama4TextConfig",
        {**TEXT, "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2, "intermediate_size_mlp": 32},
    ),
    "bloom": ("CausalLM", "BloomConfig", {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "phimoe": ("CausalLM", "PhimoeConfig", {**TEXT, "num_key_value_heads": 2, "num_local_experts": 4}),
    "mixtral": ("CausalLM", "MixtralConfig", {**TEXT, "num_key_value_heads": 2, "num_local_experts": 4}),
    "mamba": (
        "CausalLM",
        "MambaConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    ),
    "bert": ("MaskedLM", "BertConfig", TEXT),
    "deberta": ("MaskedLM", "DebertaV2Config", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "t5": (
        "Seq2SeqLM",
        "T5Config",
        {**SEQUENCES, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "bart": ("Seq2SeqLM", "BartConfig", {**SEQUENCES, "encoder_layers": 1, "decoder_layers": 1}),
    "vit": ("ImageClassification", "ViTConfig", IMAGE),
    "swin": (
        "ImageClassification",
        "SwinConfig",
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "resnet": ("ImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "convnext": ("ImageClassification", "ConvNextConfig", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "wav2vec2": (
        "AudioClassification",
        "Wav2Vec2Config",
        {
            **SPEECH,
            **TEXT,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
        },
    ),
    "wav2vec2-ctc": (
        "CTC",
        "Wav2Vec2Config",
        {
            **SPEECH,
            **TEXT,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
        },
    ),
}
WRITING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deberta": ("MaskedLM", "DebertaConfig", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "swinv2": (
        "ImageClassification",
        "Swinv2Config",
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
}
"""Models that write into slices, whose nodes hide what they have saved."""
FUNCTIONS = {"bloom", "phimoe"}
"""Models with a torch.autograd.Function of their own: element-wise ones need no rule with ``missing="exact"``."""


def batch_of(task: str) -> dict[str, torch.Tensor]:
    labels = torch.tensor([0, 1])
    if task == "ImageClassification":
        return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels}
    if task == "CTC":
        return {"input_values": torch.randn(2, 800), "labels": torch.randint(1, WORDS, (2, 5))}
    if task == "AudioClassification":
        return {"input_values": torch.randn(2, 400), "labels": labels}
    tokens = torch.randint(3, WORDS, (2, 9))
    return {"input_ids": tokens, "labels": tokens}


def model_of(task: str, config: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{task}").from_config(getattr(transformers, config)(**options)).train()


@pytest.mark.parametrize("name", MODELS)
def test_model_runs_untouched(name: str) -> None:
    task, config, options = MODELS[name]
    model, batch = model_of(task, config, options), batch_of(task)

    def loss() -> torch.Tensor:
        torch.manual_seed(1)  # the same dropout twice
        return model(**batch).loss

    loss().backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    hesscale.backward(loss(), missing="exact" if name in FUNCTIONS else "raise")
    for key, p in model.named_parameters():
        if key in expected:
            assert torch.equal(p.grad, expected[key]), key
            assert torch.isfinite(p.curvature).all(), key


@pytest.mark.parametrize("missing", ["raise", "exact"])
@pytest.mark.parametrize(("task", "config", "options"), [*WRITING.values(), MODELS["gpt2"]], ids=[*WRITING, "gpt2"])
def test_checkpoints_change_nothing(task: str, config: str, options: dict[str, Any], missing: Any) -> None:
    model, batch = model_of(task, config, options).double(), batch_of(task)
    batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}

    def found() -> dict[str, torch.Tensor | None]:
        torch.manual_seed(1)
        return hesscale.diagonal(model(**batch).loss, model, missing=missing)

    expected = found()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = found()
    for key, s in expected.items():
        torch.testing.assert_close(checkpointed[key], s, rtol=1e-10, atol=1e-12)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(hesscale.MissingRuleError, match="use_reentrant=False"):
        found()
