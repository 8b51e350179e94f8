"""What the supported target families do differently around their embedding, lm_head and final norm, as data.

The families differ inside their layers too, but a drafter never sees that: it reads the layers' outputs.
Legend: D hidden size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from model.errors import UnsupportedTarget


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """The defaults are what most families do."""

    scales_embedding: bool = False
    """Embeddings enter the first layer multiplied by √D, the factor rounded to the model's dtype."""
    norm_adds_one: bool = False
    """The final RMS norm multiplies by (1 + weight), in float32; else by weight, in the model's dtype."""
    tied_by_default: bool = False
    """lm_head = embedding when config.json does not say."""
    softcap_by_default: float | None = None
    """final_logit_softcapping when config.json does not say."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "gemma": Family(scales_embedding=True, norm_adds_one=True, tied_by_default=True),
    "gemma2": Family(scales_embedding=True, norm_adds_one=True, tied_by_default=True, softcap_by_default=30.0),
    "gemma3_text": Family(scales_embedding=True, norm_adds_one=True, tied_by_default=True),
}
"""By `model_type` of the language model (the `text_config` of a multi-modal one); SmolLM2 is a `llama`."""

# Settings of other families that change what the two matrices mean; one that is not neutral is refused.
_FOREIGN_SCALES = ("logit_scale", "logits_scaling", "embedding_multiplier", "lm_head_multiplier", "scale_emb")
_SOFTCAP, _TIED = "final_logit_softcapping", "tie_word_embeddings"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadFacts:
    """What a target's config.json says about its embedding, lm_head and final norm."""

    model_type: str
    hidden_size: int
    vocab_size: int
    tied: bool
    embedding_scale: float | None
    """√D for the families that scale; None: embeddings are used as stored."""
    logit_softcap: float | None
    """c of logits = c·tanh(lm_head(h) / c); None: not capped."""
    norm_eps: float
    norm_adds_one: bool


def head_facts(config: Mapping[str, Any], *, source: str) -> HeadFacts:
    """The facts of a config.json, given as a mapping; `source` names it in messages.

    Raises UnsupportedTarget for a family that is not in FAMILIES, for settings that no supported family has, and for
    a config that lacks a size.
    """
    text = config.get("text_config") or config
    model_type = str(text.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedTarget(
            f"{source}: model_type {model_type!r} is not a supported target family; supported: {', '.join(FAMILIES)} "
            "(SmolLM2 is a llama; a multi-modal model counts by its text_config)"
        )
    cap = text.get(_SOFTCAP, family.softcap_by_default)
    foreign = [key for key in _FOREIGN_SCALES if text.get(key) not in (None, 1, 1.0)]
    # transformers' multi-modal Gemma 3 does not apply the cap that its text part may name; other engines do.
    if cap is not None and (not family.scales_embedding or text is not config):
        foreign.append(_SOFTCAP)
    if foreign:
        found = ", ".join(f"{key} {text[key]}" for key in foreign)
        raise UnsupportedTarget(
            f"{source}: {found} in a {model_type} target changes its logits or embeddings in a way that the drafter "
            "does not reproduce; use a checkpoint of the family without it"
        )
    missing = [key for key in ("hidden_size", "vocab_size", "rms_norm_eps") if text.get(key) is None]
    if missing:
        raise UnsupportedTarget(f"{source}: no {', '.join(missing)}; wanted the whole config of a {model_type}")
    # A multi-modal model ties by its outer config; the text part's flag counts where the outer one is silent.
    tied = next((part[_TIED] for part in (config, text) if part.get(_TIED) is not None), family.tied_by_default)
    return HeadFacts(
        model_type=model_type,
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        tied=bool(tied),
        embedding_scale=math.sqrt(text["hidden_size"]) if family.scales_embedding else None,
        logit_softcap=None if cap is None else float(cap),
        norm_eps=float(text["rms_norm_eps"]),
        norm_adds_one=family.norm_adds_one,
    )
