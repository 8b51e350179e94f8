"""Tiny targets in Hugging Face layout, with random weights and a real tokenizer, made on the spot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

GOLDEN = Path(__file__).parent.parent / "golden"

LAYERS = 4
HIDDEN = 32
VOCAB = 1024

# Family -> (class names without Config / ForCausalLM, what its config needs beside the common sizes).
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("Gemma3", {"sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 7.0}),
}
FAMILIES = (*_FAMILIES, "gemma3")
"""gemma3: the multi-modal model, whose language model's config is nested."""
TIED = ("gemma", "gemma2", "gemma3_text", "gemma3")


def save_tiny_target(folder: Path, *, family: str = "qwen3", seed: int = 0, head_dim: int = 8, **config: Any) -> Path:
    """A 4-layer float32 model of 32 channels in `folder`, norm weights far from 1, with the golden ChatML tokenizer.

    vLLM wants a `head_dim` of at least 32. `config` overrides the family's.
    """
    torch.manual_seed(seed)
    model = _nested_gemma() if family == "gemma3" else _model(family, head_dim, config)
    with torch.no_grad():
        norm = model.get_decoder().norm.weight
        norm.copy_(torch.rand(len(norm)) * 4 - 2)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(GOLDEN / "tokenizer" / name, folder / name)
    return folder


def _sizes(head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 2,
    }


def _model(family: str, head_dim: int, overrides: dict[str, Any]) -> Any:
    name, special = _FAMILIES[family]
    config_name = "Gemma3TextConfig" if family == "gemma3_text" else f"{name}Config"
    tied = {"tie_word_embeddings": family in TIED}
    config = getattr(transformers, config_name)(**{**_sizes(head_dim), **tied, **special, **overrides})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _nested_gemma() -> Any:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**_sizes(8), **_FAMILIES["gemma3_text"][1], "final_logit_softcapping": None}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)
