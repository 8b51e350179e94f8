"""Tiny targets in Hugging Face layout, with random weights and a real tokenizer, made on the spot."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.golden_data import GOLDEN

LAYERS = 4
HIDDEN = 32
VOCAB = 1024

_FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def save_tiny_target(folder: Path, *, family: str = "qwen3", seed: int = 0, head_dim: int = 8) -> Path:
    """A 4-layer float32 model of 32 channels in `folder`, norm weights far from 1, with the golden ChatML tokenizer.

    vLLM wants a `head_dim` of at least 32.
    """
    config_class, model_class = _FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=2,
    )
    model = model_class(config)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(HIDDEN) * 4 - 2)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(GOLDEN / "tokenizer" / name, folder / name)
    return folder
